"""The first hours of somebody new, from a wheel in a fresh environment and outside of the checkout: what they
type, what they see, how long it takes, and the exit codes."""

from __future__ import annotations

import email
import gzip
import json
import math
import re
import socket
import subprocess
import tarfile
import zipfile

import pytest

from command_line import ROOT
from fake_hub import FakeHub
from newcomer import CONFIG, END_S, Installation, Shell, environment, interrupted
from other_models import TASK as WORDS
from other_models import write_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("newcomer")]


def test_the_package_is_complete_and_describes_itself(installation: Installation) -> None:
    with tarfile.open(installation.sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        *("CHANGELOG.md", "LICENSE", "Makefile", "PACKAGE.md", "README.md", "constraints.txt", "mkdocs.yml"),
        *("docs/start.md", "docs/api/client.md", "docs/token_buffer.svg"),
        *("examples/arithmetic.yaml", "examples/plain_agent.py", "src/tinkerscript/starter/train.yaml"),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py")),
    }
    assert files <= source, files - source
    assert not [name for name in source if name.startswith("tests") or name.endswith(".pyc")]
    with zipfile.ZipFile(installation.wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
    package = {name.removeprefix("tinkerscript/") for name in names if name.startswith("tinkerscript/")}
    assert {"py.typed", "engine/tiny/model.safetensors", "starter/train.yaml", "starter/agent.py"} <= package
    assert {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")} <= set(names)
    extras = set(metadata.get_all("Provides-Extra", []))
    watching, clusters = {"tensorboard", "trackio", "wandb"}, {"ray", "postgres", "remote"}
    environments = {"verifiers", "reasoning-gym", "textarena", "openenv"}
    assert (
        extras
        == {"server", "engine", "inspect", "datasets", "all", "quantized"}
        | watching
        | clusters
        | environments
    )
    links = re.findall(r"\]\((.*?)\)", str(metadata.get_payload()))
    assert links
    assert all(link.startswith("https://") for link in links), "an index has no other files"


def test_from_init_to_an_episode_on_the_screen(shell: Shell) -> None:
    assert shell.run("--version") == (0, "tinkerscript 0.1.0\n")
    code, text = shell.run("init", "mine")
    assert code == 0
    assert "tinkerscript train mine/train.yaml\n" in text
    with_agent = re.findall(r"tinkerscript (train mine/train.yaml --set workers.script=mine/agent.py)$", text)
    assert shell.run("init", "mine")[0] == 2, "nothing is overwritten"
    short = ["--set=training.steps=1", "--set=training.groups_per_step=4", "--set=workers.count=1"]
    short += ["--set=training.inspect_log_every=1", "--set=interchange_server.interchange_server_port=0"]
    # From another folder than the config's: its paths are relative to itself.
    code, text = shell.run("train", "mine/train.yaml", *short, "--set=evaluation.episodes=8")
    assert code == 0, text
    assert "held-out score after" in text
    latest = shell.folder / "runs" / "latest"
    assert latest.is_symlink()
    assert (latest / "learning_curve.png").stat().st_size
    assert len(list((latest / "inspect").glob("*.eval"))) == 3, "two evaluations and a step"
    for line in (latest / "metrics.jsonl").read_text().splitlines():
        assert all(math.isfinite(value) for value in json.loads(line).values())
    code, text = shell.run("show", "runs/latest")
    assert (code, "finished after 1 step" in text) == (0, True), text
    (uuid, *_) = re.findall(r"^ +([0-9a-f]{8}) ", text, flags=re.MULTILINE)
    code, text = shell.run("show", "runs/latest", uuid)
    assert (code, "── assistant" in text) == (0, True), text
    alone = ["--set=enable_tinkerscript_mode=false", "--set=evaluation.episodes=0"]
    code, text = shell.run(*with_agent[0].split(), *short, *alone)
    assert code == 0, text
    assert str(shell.folder / "mine" / "agent.py") in (latest / "config.yaml").read_text()
    lines = gzip.decompress((latest / "rollouts" / "step_0001.jsonl.gz").read_bytes()).splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert (len(rewards), set(rewards)) == (4 * 8, {0.0, 1.0}), "the agent's own"


def test_the_readmes_program_trains_in_one_process(shell: Shell) -> None:
    """As printed, but shorter; the README's agent is in the test of bare machines."""
    program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    for size, less in (("steps=3", "steps=1"), ("episodes=100", "episodes=8")):
        assert size in program
        program = program.replace(size, less)
    (shell.folder / "examples").symlink_to(ROOT / "examples")
    command = [shell.program.parent / "python", "-c", program]
    said = subprocess.check_output(command, cwd=shell.folder, env=environment(), text=True)
    assert "'before': " in said
    assert "'after': " in said
    summary = json.loads((shell.folder / "runs" / "latest" / "summary.json").read_text())
    assert summary["train_episodes"] == 8 * 8


@pytest.mark.long
def test_any_chat_model_of_the_hub_trains(shell: Shell) -> None:
    """A second run of it needs no network. test_other_models.py trains others from their folders."""
    (shell.folder / "words.py").write_text(WORDS)
    short = ["--set=task.name=words.py@words", "--set=training.steps=1"]
    hub = FakeHub()
    hub.models["acme/words"] = write_model("qwen2.5", shell.folder / "served")
    of_the_hub = [*short, "--set=engine.model=acme/words"]
    home = {"HF_HOME": str(shell.folder / "hf")}
    with hub.serving() as url:
        code, text = shell.run("train", "run.yaml", *of_the_hub, HF_ENDPOINT=url, **home)
    assert code in (0, 3), text  # 3: every reply of random weights had the same reward.
    code, text = shell.run("train", "run.yaml", *of_the_hub, HF_HUB_OFFLINE="1", **home)
    assert code in (0, 3), text  # 3: every reply of random weights had the same reward.
    code, text = shell.run("train", "run.yaml", "--set=engine.model=acme/other", HF_HUB_OFFLINE="1", **home)
    assert (code, "'acme/other' is neither a folder nor completely in the cache" in text) == (2, True), text


@pytest.mark.long
def test_bare_machines_run_the_episodes_of_a_server(shell: Shell, installation: Installation) -> None:
    """A rollout machine, installed as the README says, runs the README's agent and has no extra; one for
    Inspect tasks and the server's machine need only their own."""
    (shell.folder / "run.yaml").write_text(CONFIG.replace("workers: {count: 1}", "workers: {count: 0}"))
    readme = (ROOT / "README.md").read_text()
    _, agent = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (beside,) = re.findall(r"^pip install \.(.*)# a rollout machine", readme, flags=re.MULTILINE)
    (shell.folder / "agent.py").write_text(agent)
    server, inspect = (Shell(shell.folder, installation.program(each)) for each in ("[server]", "[inspect]"))
    bare = Shell(shell.folder, installation.program("", *beside.split()))
    heavy = "('torch', 'fastapi', 'zmq', 'numpy')"
    found = f"import importlib.util as u; print([n for n in {heavy} if u.find_spec(n)])"
    assert subprocess.check_output([bare.program.parent / "python", "-c", found], text=True) == "[]\n"
    serving = server.start("serve", "run.yaml", output="server.txt")
    serving.until(lambda: "run episodes" in serving.text())
    (folder,) = re.findall(r"train with it +tinkerscript train CONFIG --join (\S+)", serving.text())
    (url,) = re.findall(r"run episodes +tinkerscript worker --task \S+ --server (\S+)", serving.text())
    of_agent = ["agent.py", "--episode-type", "train"]
    of_task = ["--task", "tasks.py@sums", "--episode-type", "eval"]
    workers = [
        bare.start("worker", *of_agent, "--server", url, output="bare.txt"),
        inspect.start("worker", *of_task, "--server", url, output="inspect.txt"),
    ]
    for worker in workers:
        worker.until(lambda worker=worker: "waiting for an episode: " in worker.text())
    code, text = shell.run("train", "run.yaml", "--join", folder)
    assert code == 0, text
    assert f"tinkerscript worker --task tasks.py@sums --server {url}" in text
    for worker in workers:
        assert worker.wait(seconds=20) == 0, "the run is finished"
        assert "ended=8" in worker.text()
    code, text = server.run("show", folder)
    assert (code, "finished after 2 steps" in text) == (0, True), text
    assert bare.run("status", "--server", url)[0] == 0
    assert interrupted(serving)[1] < END_S
    code, text = bare.run("train", "run.yaml")
    assert (code, "pip install 'tinkerscript[all]'" in text) == (2, True), text


def test_a_wait_for_a_service_is_named_and_ctrl_c_ends_it(shell: Shell) -> None:
    with socket.socket() as silent:  # It accepts connections and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        service = ["--set=engine.backend=tinker", f"--set=engine.base_url={url}"]
        training = shell.start("train", "run.yaml", *service, TINKER_API_KEY="tml-x")
        training.until(lambda: f"waiting for the Tinker service ({url})" in training.text(), seconds=60)
        code, seconds = interrupted(training)
    assert (code, seconds < END_S) == (130, True), training.text()


@pytest.mark.long
def test_a_step_that_trains_nothing_says_why(shell: Shell) -> None:
    code, text = shell.run("train", "run.yaml", "--set=task.name=tasks.py@equal")
    assert code == 3, text
    assert "step 1 trained nothing: in each of the 2 groups all rewards are equal (all are 0.5)" in text
