"""`examples/cluster`: scripts, manifests and units start the processes of run.yaml's plan, and are valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from command_line import ROOT
from tinkerscript.client.runner import DEFAULT_GRACE_S
from tinkerscript.config import load_config
from tinkerscript.lifecycle import INTERRUPTED, STOP_WITHIN_S
from tinkerscript.processes.launcher import Slot
from tinkerscript.processes.planned import PlannedProcess, plan_of

FOLDER = ROOT / "examples" / "cluster"
SLURM, UNITS = FOLDER / "slurm", FOLDER / "systemd"
CONFIG = FOLDER / "run.yaml"
PLAN = {process.name: process for process in plan_of(load_config(CONFIG), Path("/runs/gsm8k"))}
WORKERS = sum(name.startswith("worker ") for name in PLAN)
REPLICAS = sum(name.startswith("replica ") for name in PLAN)
KUBERNETES = "1.34"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def command(process: PlannedProcess, **values: str) -> list[str]:
    """The planned command with the values of its slots, by their names in lower case."""
    known = {Slot[name.upper()]: value for name, value in values.items()}
    return [known[Slot(word)] if isinstance(word, Slot) else word for word in process.command]


def elsewhere(arguments: list[str]) -> Any:
    """The config of a trainer with the `--set` options among its arguments."""
    joined = [word.removeprefix("--set=") for word in arguments if word.startswith("--set=")]
    apart = [arguments[at + 1] for at, word in enumerate(arguments) if word == "--set"]
    return load_config(CONFIG, [*joined, *apart])


def check_trainer(arguments: list[str], urls: list[str]) -> None:
    """A trainer that starts its page and, without --join, its server, and samples from all replicas."""
    config = elsewhere(arguments)
    names = [process.name for process in plan_of(config, Path("/runs/gsm8k"))]
    assert names == ["interchange server", "trainer", "page"]
    assert config.inference.replicas == urls
    assert len(urls) == REPLICAS
    assert config.inference.api_key_env == "VLLM_API_KEY"


# Slurm


@dataclass
class Ran:
    """What a script ran in the end: its words, and its environment."""

    argv: list[str]
    environ: Mapping[str, str]


def run_script(name: str, folder: Path, **environ: str) -> Ran:
    """Run a batch script with stand-ins for the programs that it would run on a node."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    stand_in = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    for program in ("tinkerscript", "python"):
        path = programs / program
        path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{stand_in}' {program} \"$@\"\n")
        path.chmod(0o755)
    own = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "SLURM_SUBMIT_DIR": str(SLURM)}
    script = ["bash", str(SLURM / name)]
    return Ran(*json.loads(subprocess.check_output(script, env={**own, **environ}, cwd=folder, timeout=60)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    found = tmp_path / "runs" / "gsm8k"
    for name in ("secrets", "replicas"):
        (found / name).mkdir(parents=True)
    (found / "secrets" / "replica_key").write_text("the-replicas-key\n")
    (found / "secrets" / "client_token").write_text("the-clients-token\n")
    return found


def directives(name: str) -> dict[str, str]:
    """The options of a batch script."""
    lines = [line for line in (SLURM / name).read_text().splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in lines for word in shlex.split(line)[1:]]
    assert all(word.startswith("--") for word in words), words
    return {key.removeprefix("--"): value for key, _, value in (word.partition("=") for word in words)}


KNOWN = [
    "job-name",
    "array",
    "nodes",
    "ntasks",
    "cpus-per-task",
    "gpus-per-task",
    "mem",
    "time",
    "requeue",
    "signal",
]
"""Options of sbatch, by its manual."""


@pytest.mark.parametrize(
    ("script", "name", "number"),
    [
        ("trainer.sbatch", "trainer", 1),
        ("replicas.sbatch", "replica 0", REPLICAS),
        ("workers.sbatch", "worker 0", WORKERS),
    ],
)
def test_a_slurm_job_asks_for_what_its_processes_take(script: str, name: str, number: int) -> None:
    found, room = directives(script), PLAN[name].resources
    assert found.keys() <= set(KNOWN)
    assert found.get("array", "0-0") == f"0-{number - 1}"
    cpus = room.cpus + (PLAN["interchange server"].resources.cpus if name == "trainer" else 0)
    assert int(found["cpus-per-task"]) == cpus
    assert int(found.get("gpus-per-task", 0)) == room.gpus
    assert re.fullmatch(r"\d+G", found["mem"])
    assert re.fullmatch(r"\d+:\d\d:\d\d", found["time"])


def test_slurms_workers_and_replicas_are_the_plans(run: Path, tmp_path: Path) -> None:
    (run / "server.url").write_text("http://head:10086\n")
    ran = run_script("workers.sbatch", tmp_path, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert ran.argv == command(PLAN["worker 3"], client="slurm-7-3")
    assert ran.environ["TINKERSCRIPT_SERVER_URL"] == "http://head:10086"
    assert ran.environ["TINKERSCRIPT_CLIENT_TOKEN_FILE"] == str(run / "secrets" / "client_token")
    ran = run_script("replicas.sbatch", tmp_path, SLURM_ARRAY_TASK_ID="2")
    host, port = re.fullmatch(r"http://(.+):(\d+)\n", (run / "replicas" / "2.url").read_text()).groups()  # type: ignore[union-attr]
    assert ran.argv == command(PLAN["replica 2"], model="Qwen/Qwen3-8B", host=host, port=port)
    for key, value in PLAN["replica 2"].environment.items():
        assert ran.environ[key] == (str(run / "adapters") if value == Slot.ADAPTERS else value)
    assert ran.environ["VLLM_API_KEY"] == "the-replicas-key"


@pytest.mark.parametrize("resumes", [False, True])
def test_a_slurm_trainer_waits_for_its_replicas(run: Path, tmp_path: Path, resumes: bool) -> None:
    urls = [f"http://gpu{number}:800{number}" for number in range(REPLICAS)]
    for number, url in enumerate(urls):
        (run / "replicas" / f"{number}.url").write_text(f"{url}\n")
    if resumes:
        (run / "config.yaml").touch()
    ran = run_script("trainer.sbatch", tmp_path, CONFIG=str(CONFIG))
    assert ran.argv[:2] == ["tinkerscript", "train"]
    assert ran.argv[2:4] == (["--resume", str(run)] if resumes else [str(CONFIG), "--set"])
    check_trainer(ran.argv, urls)
    assert resumes or f"experiment_dir={run}" in ran.argv
    assert ran.environ["TINKERSCRIPT_ADMIN_TOKEN_FILE"] == str(run / "secrets" / "admin_token")
    assert re.fullmatch(r"http://.+:10086\n", (run / "server.url").read_text())


def test_submitting_makes_secrets_that_only_their_owner_reads(tmp_path: Path) -> None:
    log = tmp_path / "sbatch.log"
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(f'#!/bin/sh\necho "$*" >> {log}\necho 41\n')
    (programs / "sbatch").chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    subprocess.run([SLURM / "submit.sh"], env=environ, check=True, capture_output=True, timeout=60)
    secrets = list((tmp_path / "runs" / "gsm8k" / "secrets").iterdir())
    assert {path.name for path in secrets} == {"client_token", "admin_token", "replica_key"}
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    jobs = log.read_text().splitlines()
    assert [job.split()[-1] for job in jobs] == ["trainer.sbatch", "replicas.sbatch", "workers.sbatch"]
    assert all("--dependency=after:41" in job for job in jobs[1:])
    assert not any(path.read_text().strip() in log.read_text() for path in secrets)


@pytest.mark.parametrize("path", sorted(SLURM.iterdir()), ids=lambda path: path.name)
def test_the_scripts_have_no_faults_that_shellcheck_knows(path: Path) -> None:
    checked = subprocess.run(
        [SHELLCHECK, "--shell=bash", "--exclude=SC1091,SC2034", path], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


# Kubernetes


DOCUMENTS: dict[str, dict[str, Any]] = {
    f"{document['kind']} {document['metadata']['name']}": document
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


def container(document: str, name: str) -> dict[str, Any]:
    pod = DOCUMENTS[document]["spec"]["template"]["spec"]
    (found,) = [each for each in [*pod.get("initContainers", []), *pod["containers"]] if each["name"] == name]
    return found


def variables(found: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in found["env"]}


def check_room(found: dict[str, Any], process: PlannedProcess) -> None:
    resources = found["resources"]
    assert float(resources["requests"]["cpu"]) == process.resources.cpus
    assert int(resources["limits"].get("nvidia.com/gpu", 0)) == process.resources.gpus
    assert "memory" in resources["limits"]


def check_container(found: dict[str, Any], name: str, **values: str) -> None:
    """It runs the planned process, whose secrets come from the cluster's and stand in no manifest."""
    process, entries = PLAN[name], {each["name"]: each for each in found["env"]}
    assert found["command"] == command(process, **values)
    check_room(found, process)
    for secret in process.secrets:
        assert entries[secret]["valueFrom"]["secretKeyRef"]["name"] == "tinkerscript", secret


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_manifest_is_valid(name: str) -> None:
    assert kubernetes_validate.validate(DOCUMENTS[name], KUBERNETES, strict=True)


def test_the_pods_run_the_plan() -> None:
    server = container("Job tinkerscript-run", "server")
    check_container(server, "interchange server")
    assert server["restartPolicy"] == "Always", "a sidecar"
    worker = container("Job worker", "worker")
    check_container(worker, "worker 0", client="$(POD_NAME)")
    assert DOCUMENTS["Job worker"]["spec"]["parallelism"] == WORKERS
    replica = container("StatefulSet replica", "replica")
    check_container(replica, "replica 0", model="Qwen/Qwen3-8B", host="$(POD_IP)", port="8000")
    assert DOCUMENTS["StatefulSet replica"]["spec"]["replicas"] == REPLICAS
    server_url = variables(worker)["TINKERSCRIPT_SERVER_URL"]
    values = PLAN["replica 0"].environment | {"TINKERSCRIPT_ADAPTERS": f"{server_url}/adapters"}
    assert values.items() <= variables(replica).items()


def test_whoever_stops_a_worker_waits_until_it_has_drained() -> None:
    takes_s = DEFAULT_GRACE_S + 2 * STOP_WITHIN_S
    pod = DOCUMENTS["Job worker"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= takes_s
    assert float(unit("tinkerscript-worker@.service")["TimeoutStopSec"][0]) >= takes_s
    assert str(INTERRUPTED) in unit("tinkerscript-worker@.service")["SuccessExitStatus"]
    number, _, before_s = directives("workers.sbatch")["signal"].partition("@")
    assert (number, float(before_s) >= takes_s) == ("B:TERM", True)


def test_the_trainer_of_kubernetes_joins_the_server_and_knows_the_replicas(tmp_path: Path) -> None:
    for text in ("first", "second"):  # A pod that starts again keeps the folder, with its config.
        (tmp_path / "run.yaml").write_text(text)
        script = container("Job tinkerscript-run", "folder")["command"][-1]
        script = script.replace("/runs", f"{tmp_path}/runs").replace("/config/", f"{tmp_path}/")
        subprocess.run(["sh", "-c", script], timeout=60)
        assert (tmp_path / "runs" / "gsm8k" / "config.yaml").read_text() == "first"
    trainer = container("Job tinkerscript-run", "trainer")
    assert trainer["command"][:4] == ["tinkerscript", "train", "/config/run.yaml", "--join=/runs/gsm8k"]
    check_trainer(trainer["command"], [f"http://replica-{number}.replica:8000" for number in range(REPLICAS)])
    check_room(trainer, PLAN["trainer"])
    assert "VLLM_API_KEY" in variables(trainer)


# The rest


def unit(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_a_unit_of_a_worker_is_the_plans() -> None:
    (line,) = unit("tinkerscript-worker@.service")["ExecStart"]
    program, *arguments = shlex.split(line)
    assert Path(program).name == "tinkerscript"
    assert ["tinkerscript", *arguments] == command(PLAN["worker 0"], client="%H-%i")


@pytest.mark.parametrize("resumes", [False, True])
def test_the_unit_of_a_run_starts_or_resumes_it(tmp_path: Path, resumes: bool) -> None:
    (line,) = unit("tinkerscript-run.service")["ExecStart"]
    shell, option, script = shlex.split(line)
    if resumes:
        (tmp_path / "config.yaml").touch()
    script = script.replace("exec /opt/tinkerscript/bin/tinkerscript", "printf '%s\\n'")
    output = subprocess.check_output([shell, option, script], env={"RUN": str(tmp_path)}, text=True)
    words = output.splitlines()
    assert words[:3] == (
        ["train", "--resume", str(tmp_path)] if resumes else ["train", "/etc/tinkerscript/run.yaml", "--set"]
    )
    if not resumes:
        names = [process.name for process in plan_of(elsewhere(words), Path("/runs/gsm8k"))]
        assert names == list(PLAN), "all of the plan, on one machine"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not here")
@pytest.mark.parametrize("name", ["tinkerscript-run.service", "tinkerscript-worker@.service"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    text = (UNITS / name).read_text().replace("/opt/tinkerscript/bin/tinkerscript", "/bin/true")
    path = tmp_path / name
    path.write_text(text)
    checked = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert name not in checked.stderr, checked.stderr
