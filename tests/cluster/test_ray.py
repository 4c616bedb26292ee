"""`cluster.launcher: ray` as a user starts it: on clusters of several nodes, which come, go and die."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import VirtualCluster, left_of

from command_line import DEMO, ROOT, SHORT, Command, as_options, metrics_lines, named, start
from run_ledger import ask, check_books, with_result

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("rollout.py")
ALONE = ("cluster.launcher=local", "cluster.address=''", "engine.devices=1")

LONG_S = 400
"""For what takes seconds on an idle machine."""

TOKENS = {
    "TINKERSCRIPT_CLIENT_TOKEN": "a-token-that-nobody-may-see",
    "TINKERSCRIPT_ADMIN_TOKEN": "another-token-that-nobody-may-see",
}


def train(folder: Path, config: Path = DEMO, **settings: Any) -> Command:
    quick = {"evaluation.episodes": 0, "workers.script": SCRIPT, "cluster.launcher": "ray"}
    options = as_options({**SHORT, **quick, **settings})
    arguments = ("-m", "tinkerscript", "train", str(config), *options)
    return start(folder, *arguments, program=Path(sys.executable), env={**os.environ, **TOKENS})


def log_of(run: Path, number: int) -> str:
    path = run / "logs" / f"worker-{number}.log"
    return path.read_text() if path.exists() else ""


def check_secrets(run: Path, rays: Path, commands: list[str]) -> None:
    """No token is on a command line, in a log of the run, or in one of Ray's."""
    logs = [*(run / "logs").iterdir(), *rays.iterdir()]
    texts = [*commands, *(path.read_text(errors="replace") for path in logs if path.is_file())]
    assert not [text for text in texts if any(token in text for token in TOKENS.values())]


def test_a_node_that_goes_in_the_middle_takes_no_episode_with_it(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    """Its worker waits for another node and goes on there; interrupted, the run goes on without a cluster."""
    run = tmp_path / "run"
    cluster.add(cpus=3)
    nodes = cluster.add(cpus=1), cluster.add(cpus=1)
    command = train(
        tmp_path,
        **{
            "cluster.address": cluster.address,
            "engine.devices": 2,
            "workers.count": 2,
            "training.steps": 1000,
            "training.checkpoint_every": 1,
        },
    )
    command.until(lambda: {"0-0", "1-0"} <= names_of(run), seconds=LONG_S)
    commands = left_of(tmp_path, "tinkerscript", within_s=0)
    for process in ("tinkerscript worker", "tinkerscript rank", "tinkerscript server"):
        assert any(process in each for each in commands), process
    cluster.remove(nodes[0])
    command.until(lambda: re.search(r"waiting for 1 CPU: worker \d; Ray has", command.text()), seconds=LONG_S)
    cluster.add(cpus=1)
    command.until(lambda: {"0-1", "1-1"} & names_of(run), seconds=LONG_S)
    # A worker says how many episodes it has had from time to time.
    command.until(lambda: all("client.runner" in log_of(run, n) for n in (0, 1)), seconds=LONG_S)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(seconds=LONG_S) == 130, command.text()
    text = " ".join(command.text().split())
    assert re.search(r"worker \d died \(The actor died because its node has died\)", text), text
    assert any("its node has died" in log_of(run, number) for number in (0, 1))
    assert not left_of(tmp_path, "tinkerscript", within_s=60)
    steps = len(metrics_lines(tmp_path)) + 2
    again = resume(tmp_path, *ALONE, f"training.steps={steps}")
    assert again.wait(seconds=LONG_S) == 0, again.text()
    assert json.loads((run / "summary.json").read_text())["episodes_lost"] == 0
    check_books(run)
    check_secrets(run, cluster.logs, commands)


def resume(folder: Path, *settings: str) -> Command:
    options = [f"--set={setting}" for setting in settings]
    arguments = ("-m", "tinkerscript", "train", "--resume", "run", *options)
    return start(folder, *arguments, program=Path(sys.executable), env={**os.environ, **TOKENS})


def names_of(run: Path) -> set[str]:
    """The workers that have ended an episode: number and incarnation of each."""
    ended = "SELECT client FROM attempts JOIN episodes ON sequence = episode WHERE state = 'ended'"
    return {client.split("-", 2)[2] for (client,) in ask(run, f"{ended} AND attempts.failure IS NULL")}


VLLM = ROOT / "examples" / "arithmetic_vllm.yaml"
STAND_IN = {
    "inference.launch.python": "''",
    "inference.launch.args": "[]",
    "inference.launch.env.PYTHONPATH": f"{ROOT / 'tests' / 'launched'}{os.pathsep}{ROOT / 'tests'}",
    "inference.launch.env.PYTHONWARNINGS": "ignore",
}
"""A fake of vLLM's API server, in place of the program; all else is as in the config."""

WITHOUT_REPLICAS = (*ALONE, "inference.backend=trainer", "inference.launch={}")


@pytest.mark.long
@pytest.mark.parametrize("vllm", [pytest.param(STAND_IN, id="stand-in"), pytest.param({}, id="real")])
def test_a_replica_whose_node_goes_starts_on_another_one(
    cluster: VirtualCluster, tmp_path: Path, vllm: dict[str, str]
) -> None:
    """Its model calls are made again at the other replica."""
    run = tmp_path / "run"
    cluster.add(cpus=3)
    nodes = cluster.add(cpus=2), cluster.add(cpus=2)
    command = train(
        tmp_path,
        VLLM,
        **{
            "cluster.address": cluster.address,
            "inference.launch.cpus": 2,
            "training.steps": 1000,
            "training.checkpoint_every": 1,
            **vllm,
        },
    )
    command.until(lambda: len(with_result(run)) > 20, seconds=LONG_S)
    commands = left_of(tmp_path, "tinkerscript", within_s=0)
    assert sum("with_parent" not in each and "vllm.entrypoints" in each for each in commands) == 2, commands
    cluster.remove(nodes[0])
    lost = r"replica (\d) died \(The actor died because its node has died\)"
    command.until(lambda: re.search(lost, " ".join(command.text().split())), seconds=LONG_S)
    number = re.search(lost, " ".join(command.text().split()))[1]  # type: ignore[index]
    steps = len(metrics_lines(tmp_path))
    command.until(lambda: len(metrics_lines(tmp_path)) > steps, seconds=LONG_S)
    cluster.add(cpus=2)
    command.until(lambda: f"replica {number} samples again" in command.text(), seconds=LONG_S)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(seconds=LONG_S) == 130, command.text()
    assert not left_of(tmp_path, "tinkerscript", within_s=60)
    steps = len(metrics_lines(tmp_path)) + 1
    again = resume(tmp_path, *WITHOUT_REPLICAS, f"training.steps={steps}")
    assert again.wait(seconds=LONG_S) == 0, again.text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["episodes_lost"] == 0
    assert summary["max_abs_dlogp"] < 1e-3
    check_books(run)
    check_secrets(run, cluster.logs, commands)


def test_a_worker_that_cannot_start_shows_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import a_package_that_is_not_there\n")
    command = train(tmp_path, **{"workers.script": script})
    assert command.wait(seconds=LONG_S) == 2, command.text()
    text = command.text()
    assert "worker 0 ended (exit code 2) after 0 restarts; the end of run/logs/worker-0.log" in text
    assert "No module named 'a_package_that_is_not_there'" in text
    assert not left_of(tmp_path, "", within_s=60), "the run's own Ray ends with it"


@pytest.mark.long
def test_a_run_whose_head_dies_ends_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    command = train(tmp_path, **{"training.steps": 1000})
    command.until(lambda: metrics_lines(tmp_path), seconds=LONG_S)
    (head,) = named(command.family(), "gcs_server")
    head.kill()
    assert command.wait(seconds=LONG_S) != 0
    text = " ".join(command.text().split())
    assert "the Ray cluster is lost" in text
    assert "resume with: tinkerscript train --resume run" in text
    assert not left_of(tmp_path, "", within_s=60)
