"""The first hours of somebody new, from a wheel in a fresh environment and outside of the checkout: what they
type, what they see, how long it takes, and the exit codes."""

from __future__ import annotations

import email
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import ROOT, Command, start
from fake_hub import FakeHub
from other_models import TASK as WORDS
from other_models import write_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("newcomer")]

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, accuracy, match, scorer
from inspect_ai.solver import generate

SAMPLES = [Sample(id=n, input=f"What is {n}+{n}?", target=str(2 * n)) for n in range(10, 40)]


def scored(value):
    @scorer(metrics=[accuracy()])
    def fixed():
        async def score(state, target):
            if value == "raise":
                raise ValueError("the scorer broke")
            return None if value is None else Score(value=value)
        return score
    return Task(dataset=SAMPLES, solver=generate(), scorer=fixed())


@task
def raising():
    return scored("raise")


@task
def nothing():
    return scored(None)


@task
def strings():
    return scored("splendid")


@task
def equal():
    return scored(0.5)


@task
def unscored():
    return Task(dataset=SAMPLES, solver=generate())


@task
def empty():
    return Task(dataset=MemoryDataset([]), solver=generate(), scorer=match())


@task
def sums():
    return Task(dataset=SAMPLES, solver=generate(), scorer=match())
"""

CONFIG = """
task: {name: tasks.py@sums}
interchange_server: {interchange_server_port: 0}
sampling: {max_tokens: 8}
training: {steps: 2, groups_per_step: 2, group_size: 2}
evaluation: {episodes: 4}
workers: {count: 1}
"""

PLAIN_AGENT = '''
import json
from urllib.request import Request, urlopen


def rollout(episode):
    """The standard library alone: a bare install runs it."""
    body = {"model": "policy", "messages": [{"role": "user", "content": episode.payload["sample"]["input"]}]}
    headers = {"Authorization": f"Bearer {episode.openai_api_key}", "Content-Type": "application/json"}
    request = Request(f"{episode.openai_base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request) as response:
        text = json.load(response)["choices"][0]["message"]["content"]
    return float(text == episode.payload["sample"]["target"])
'''


def environment(**more: str) -> dict[str, str]:
    """The caller's, without what points to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINKER"))}
    return {**kept, "COLUMNS": "100", **more}


BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "logs", "runs", "site"
)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy of the checkout: what an earlier build left there would come along."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = shutil.copytree(ROOT, folder / "checkout", ignore=NOT_SOURCE)
    build = [sys.executable, "-c", BUILD_SDIST, folder]
    subprocess.run(build, cwd=copy, check=True, env=environment(), capture_output=True)
    (path,) = folder.glob("tinkerscript-*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist]
    subprocess.run(build, check=True, env=environment())
    (path,) = folder.glob("tinkerscript-*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs the wheel with these extras in an environment of its own; returns its `tinkerscript`."""
    made: dict[str, Path] = {}

    def install(extras: str) -> Path:
        if extras not in made:
            folder = tmp_path_factory.mktemp("environment")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
            pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
            options = ["--no-compile", "--constraint", ROOT / "constraints.txt"]
            subprocess.run([*pip, *options, f"{wheel}{extras}"], check=True, env=environment())
            made[extras] = folder / "bin" / "tinkerscript"
        return made[extras]

    return install


@dataclass
class Shell:
    """A folder, and a `tinkerscript` to type."""

    folder: Path
    program: Path

    def start(self, *arguments: str, output: str = "output.txt", **env: str) -> Command:
        return start(self.folder, *arguments, env=environment(**env), program=self.program, output=output)

    def run(self, *arguments: str, seconds: float = 150, **env: str) -> tuple[int, str]:
        command = self.start(*arguments, **env)
        code = command.wait(seconds=seconds)
        assert "Traceback" not in command.text(), command.text()
        return code, command.text()


@pytest.fixture
def shell(tmp_path: Path, installed: Callable[[str], Path]) -> Shell:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "agent.py").write_text(PLAIN_AGENT)
    return Shell(tmp_path, installed("[all]"))


def interrupted(command: Command) -> tuple[int, float]:
    """The exit code after Ctrl-C, and the seconds until it ended."""
    began = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    return command.wait(), time.monotonic() - began


def test_the_package_is_complete_and_describes_itself(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        *("CHANGELOG.md", "LICENSE", "Makefile", "PACKAGE.md", "README.md", "constraints.txt", "mkdocs.yml"),
        *("docs/start.md", "docs/api/client.md", "docs/token_buffer.svg"),
        *("examples/arithmetic.yaml", "examples/plain_agent.py", "src/tinkerscript/starter/train.yaml"),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py")),
    }
    assert files <= source, files - source
    assert not [name for name in source if name.startswith("tests") or name.endswith(".pyc")]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
    package = {name.removeprefix("tinkerscript/") for name in names if name.startswith("tinkerscript/")}
    assert {"py.typed", "engine/tiny/model.safetensors", "starter/train.yaml", "starter/agent.py"} <= package
    assert {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")} <= set(names)
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"server", "engine", "inspect", "datasets", "tensorboard", "trackio", "wandb", "all"}
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
    short = ["--set=training.steps=2", "--set=evaluation.episodes=20", "--set=training.inspect_log_every=1"]
    port = "--set=interchange_server.interchange_server_port=0"
    # From another folder than the config's: its paths are relative to itself.
    code, text = shell.run("train", "mine/train.yaml", *short, port)
    assert code == 0, text
    assert "held-out score after" in text
    latest = shell.folder / "runs" / "latest"
    assert latest.is_symlink()
    assert (latest / "learning_curve.png").stat().st_size
    assert len(list((latest / "inspect").glob("*.eval"))) == 4, "two evaluations and two steps"
    for line in (latest / "metrics.jsonl").read_text().splitlines():
        assert all(math.isfinite(value) for value in json.loads(line).values())
    code, text = shell.run("show", "runs/latest", "--step", "after")
    assert code == 0, text
    assert "finished after 2 steps" in text
    (uuid, *_) = re.findall(r"^ +([0-9a-f]{8}) ", text, flags=re.MULTILINE)
    code, text = shell.run("show", "runs/latest", uuid)
    assert (code, "── assistant" in text) == (0, True), text
    assert shell.run("show", "runs/latest", "zz")[0] == 2
    code, text = shell.run(*with_agent[0].split(), "--set=training.steps=1", *short[1:], port)
    assert code == 0, text
    assert str(shell.folder / "mine" / "agent.py") in (latest / "config.yaml").read_text()
    lines = (latest / "rollouts" / "step_0001.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert (len(rewards), set(rewards)) == (16 * 8, {0.0, 1.0}), "the agent's own"


def test_a_run_in_which_nothing_succeeds_says_why(shell: Shell) -> None:
    (shell.folder / "broken_agent.py").write_text(
        "def rollout(episode):\n    raise OSError('no such tool')\n"
    )
    reasons = {
        "raising": "ValueError('the scorer broke')",
        "nothing": "check that the task has a scorer",
        "strings": "the score 'fixed' is 'splendid', not a finite number",
        "unscored": "check that the task has a scorer",
        "agent": "OSError: no such tool",
    }
    commands: dict[str, Command] = {}
    for name in reasons:
        what = "workers.script=broken_agent.py" if name == "agent" else f"task.name=tasks.py@{name}"
        folder = f"--set=experiment_dir={name}"
        commands[name] = shell.start("train", "run.yaml", "--set", what, folder, output=f"{name}.txt")
    for name, reason in reasons.items():
        code, text = commands[name].wait(seconds=400), commands[name].text()
        assert code == 2, text
        assert "error: evaluation before: all 4 episodes that ended failed:" in text
        assert reason in text
        assert f"once the cause is fixed, resume with: tinkerscript train --resume {name}" in text
        assert "serve the model" not in text


def test_mistakes_are_one_line(shell: Shell) -> None:
    messages = {
        "training.step=3": "did you mean steps?",
        "engine.device=cuda": "engine.device",
        "engine.device=cuda:0,cuda:1": "engine.device",
        "task.name=tasks.py@empty": "has no samples",
        "workers.script=nowhere.py": "no script at",
        "interchange_server.interchange_server_host=0.0.0.0": (
            "TINKERSCRIPT_CLIENT_TOKEN and TINKERSCRIPT_ADMIN_TOKEN must be set"
        ),
    }
    commands = [
        shell.start(
            "train", "run.yaml", "--set", override, f"--set=experiment_dir=run-{n}", output=f"{n}.txt"
        )
        for n, override in enumerate(messages)
    ]
    for command, message in zip(commands, messages.values(), strict=True):
        assert command.wait() == 2, command.text()
        assert message in command.text()
        assert "Traceback" not in command.text()


def test_any_chat_model_trains_from_a_folder_and_from_the_hub(shell: Shell) -> None:
    """The first answers without a network, so that a second run of it needs none."""
    (shell.folder / "words.py").write_text(WORDS)
    short = ["--set=task.name=words.py@words", "--set=training.steps=1"]
    write_model("llama3.2", shell.folder / "llama")
    code, text = shell.run("train", "run.yaml", *short, "--set=engine.model=llama")
    assert code == 0, text
    hub = FakeHub()
    hub.models["acme/words"] = write_model("qwen2.5", shell.folder / "served")
    of_the_hub = [*short, "--set=engine.model=acme/words"]
    home = {"HF_HOME": str(shell.folder / "hf")}
    with hub.serving() as url:
        code, text = shell.run("train", "run.yaml", *of_the_hub, HF_ENDPOINT=url, **home)
    assert code == 0, text
    code, text = shell.run("train", "run.yaml", *of_the_hub, HF_HUB_OFFLINE="1", **home)
    assert code == 0, text
    code, text = shell.run("train", "run.yaml", "--set=engine.model=acme/other", HF_HUB_OFFLINE="1", **home)
    assert (code, "'acme/other' is neither a folder nor completely in the cache" in text) == (2, True), text
    renderer = ["--set=engine.renderer=role_colon", "--set=enable_tinkerscript_mode=false"]
    code, text = shell.run("train", "run.yaml", *short, "--set=engine.model=llama", *renderer)
    assert (code, "does not write the prompts of" in text) == (2, True), text


def test_a_step_that_trains_nothing_says_why(shell: Shell) -> None:
    code, text = shell.run("train", "run.yaml", "--set=task.name=tasks.py@equal")
    assert code == 0, text
    assert "step 1 trained nothing: in each of the 2 groups all rewards are equal (all are 0.5)" in text


def test_waits_are_named_and_ctrl_c_ends_them(shell: Shell) -> None:
    began = time.monotonic()
    code, text = shell.run("status", "--server", "http://127.0.0.1:9")
    assert (code, time.monotonic() - began < 5) == (1, True), text
    assert "no interchange server answers at http://127.0.0.1:9" in text
    worker = shell.start("worker", "agent.py", "--server", "http://127.0.0.1:9")
    worker.until(lambda: "waiting for the server: " in worker.text(), seconds=10)
    _, seconds = interrupted(worker)
    assert seconds < 5
    with socket.socket() as silent:  # It accepts connections and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        service = ["--set=engine.backend=tinker", f"--set=engine.base_url={url}"]
        training = shell.start("train", "run.yaml", *service, TINKER_API_KEY="tml-x")
        training.until(lambda: f"waiting for the Tinker service ({url})" in training.text(), seconds=60)
        code, seconds = interrupted(training)
    assert (code, seconds < 6) == (130, True), training.text()


def test_a_stopped_run_has_its_last_step(shell: Shell) -> None:
    long = ["--set=training.steps=500", "--set=training.checkpoint_every=100", "--set=evaluation.episodes=0"]
    training = shell.start("train", "run.yaml", *long)
    run = shell.folder / "runs" / "latest"
    metrics = run / "metrics.jsonl"
    training.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    code, seconds = interrupted(training)
    assert (code, seconds < 6) == (130, True), training.text()
    folder = run.resolve()
    assert f"stopping; resume with: tinkerscript train --resume runs/{folder.name}" in training.text()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert saved == [f"step_{max(steps):04d}"]
    code, text = shell.run("train", "--resume", "runs/latest", f"--set=training.steps={max(steps) + 1}")
    assert (code, f"run folder      runs/{folder.name} " in text) == (0, True), text
    assert (run.resolve(), json.loads((run / "summary.json").read_text())["steps"]) == (
        folder,
        max(steps) + 1,
    )


def test_bare_machines_run_the_episodes_of_a_server(shell: Shell, installed: Callable[[str], Path]) -> None:
    """A rollout machine needs no extra, one for Inspect tasks and the server's machine only their own."""
    (shell.folder / "run.yaml").write_text(CONFIG.replace("workers: {count: 1}", "workers: {count: 0}"))
    server, bare, inspect = (Shell(shell.folder, installed(each)) for each in ("[server]", "", "[inspect]"))
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
    assert f"tinkerscript worker --task {shell.folder}/tasks.py@sums --server {url}" in text
    for worker in workers:
        assert worker.wait(seconds=20) == 0, "the run is finished"
        assert "ended=8" in worker.text()
    code, text = server.run("show", folder)
    assert (code, "finished after 2 steps" in text) == (0, True), text
    assert bare.run("status", "--server", url)[0] == 0
    assert interrupted(serving)[1] < 6
    code, text = bare.run("train", "run.yaml")
    assert (code, "pip install 'tinkerscript[all]'" in text) == (2, True), text
