"""Sandboxes by hand: started for a sample, used, released on every path."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, match
from inspect_ai.solver import TaskState, generate
from inspect_ai.util import sandbox, sandboxenv
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from bridge_groups import scoring
from bridge_parts import Scripted, bytes_renderer
from inspect_tinker_bridge import (
    RunnerOptions,
    SandboxConfig,
    SandboxError,
    TaskRunner,
    cleanup_sandbox,
    compute_reward,
    create_sandbox_for_sample,
    exec_in_sandbox,
    load_environment,
    load_inspect_task,
    sandbox_context,
    score_episode,
)

LOCAL = SandboxConfig("local")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where local sandboxes live; empty at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


SAMPLE = Sample(
    input="x",
    id=1,
    files={"in/a.txt": "text"},
    setup="cat in/a.txt > made && echo done >> made",
    metadata={"k": 1},
)


@scoring
async def has_text(state: TaskState, target: Target) -> Score:
    return Score(value=int(await sandbox().read_file("in/a.txt") == "text"))


async def test_files_and_setup_are_there_for_commands_and_scorers_until_cleanup(folders: Path) -> None:
    instance = await create_sandbox_for_sample(SAMPLE, "task", LOCAL)
    assert (await exec_in_sandbox(instance, ["cat", "made"])).stdout == "textdone\n"
    result = await exec_in_sandbox(
        instance.environments, ["sh", "-c", "pwd; echo $X"], env={"X": "y"}, cwd="in"
    )
    assert result.stdout.endswith("/in\ny\n")
    talk = [{"role": "assistant", "content": ""}]
    assert await compute_reward(talk, SAMPLE, [has_text()], instance) == (1.0, {"has_text": 1.0})
    async with sandbox_context(instance):
        assert await sandbox().read_file("in/a.txt") == "text"
    with pytest.raises(ProcessLookupError):
        sandbox()
    await cleanup_sandbox(instance)
    await cleanup_sandbox(instance)
    with pytest.raises(SandboxError, match="released"):
        await exec_in_sandbox(instance, ["true"])


async def test_what_goes_wrong_in_a_command_is_a_result(folders: Path) -> None:
    instance = await create_sandbox_for_sample(Sample(input="x", id=1), "task", LOCAL)
    late = await exec_in_sandbox(instance, ["sleep", "30"], timeout=1)
    assert (late.success, late.returncode) == (False, 124)
    assert "longer than 1 s" in late.stderr
    await instance.environments["default"].write_file("no", "x")
    denied = await exec_in_sandbox(instance, ["./no"])
    assert (denied.success, denied.returncode) == (False, 126)
    with pytest.raises(SandboxError, match="no sandbox 'other'; the sample has default"):
        await exec_in_sandbox(instance, ["true"], sandbox_name="other")
    await cleanup_sandbox(instance)


async def test_a_setup_that_fails_leaves_nothing(folders: Path) -> None:
    with pytest.raises(RuntimeError, match="setup script"):
        await create_sandbox_for_sample(Sample(input="x", id=1, setup="exit 3"), "task", LOCAL)


async def test_a_start_that_is_cancelled_leaves_nothing(folders: Path) -> None:
    sample = Sample(input="x", id=1, setup="touch started; exec sleep 60")
    starting = asyncio.create_task(create_sandbox_for_sample(sample, "task", LOCAL))
    while not list(folders.rglob("started")):  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_cleanup_goes_on_when_its_caller_is_cancelled(folders: Path) -> None:
    instance = await create_sandbox_for_sample(SAMPLE, "task", LOCAL)
    ending = asyncio.create_task(cleanup_sandbox(instance))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending


def test_a_process_that_ends_releases_its_sandboxes(tmp_path: Path) -> None:
    code = (
        "import asyncio\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_tinker_bridge import SandboxConfig, create_sandbox_for_sample\n"
        "made = asyncio.run(\n"
        "    create_sandbox_for_sample(Sample(input='x', id=1), 't', SandboxConfig('local')))\n"
        "print(made.environments['default']._sandbox.directory.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    assert not Path(run.stdout.strip()).exists()


async def test_a_sandbox_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nobody/listens.sock")
    with pytest.raises(SandboxError, match=r"the docker engine does not respond|docker is not installed"):
        await create_sandbox_for_sample(SAMPLE, "task", SandboxConfig())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="docker is not installed"):
        await create_sandbox_for_sample(SAMPLE, "task", SandboxConfig("docker"))
    with pytest.raises(SandboxError, match=r"'k9s'; known: .*local"):
        await create_sandbox_for_sample(SAMPLE, "task", SandboxConfig("k9s"))
    with pytest.raises(SandboxError, match="names no sandbox"):
        await create_sandbox_for_sample(SAMPLE, "task")


class _Noted(LocalSandboxEnvironment):
    """A provider as packages register them; notes its config files."""

    configs: list[object] = []  # noqa: RUF012 (of the class)

    @classmethod
    async def sample_init(cls, task_name: str, config: object, metadata: dict[str, str]) -> dict[str, object]:  # type: ignore[override]
        cls.configs.append(config)
        return {"default": cls()}


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` command that answers, and the file in which it notes that it was asked."""
    asked = tmp_path / "asked"
    command = tmp_path / "docker"
    command.write_text(f"#!/bin/sh\necho asked >> {asked}\n", encoding="utf-8")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return asked


def in_sandboxes(*specs: Any, task_sandbox: Any = None) -> Task:
    samples = [Sample(input="x", id=index, sandbox=spec) for index, spec in enumerate(specs)]
    return Task(dataset=samples, solver=generate(), scorer=match(), sandbox=task_sandbox)


def test_a_tasks_sandboxes_are_checked_once_when_it_is_loaded(
    docker: Path, tmp_path: Path, byte_model: Path
) -> None:
    (tmp_path / "compose.yaml").write_text("services: {}", encoding="utf-8")
    own = [("docker", str(tmp_path / "compose.yaml")), "docker", "local", None]
    renderer = bytes_renderer(byte_model)
    load_environment(in_sandboxes(*own), renderer)
    assert docker.read_text("utf-8") == "asked\n"
    load_environment(in_sandboxes(*own), renderer, sandbox_type="local")
    load_environment(in_sandboxes("docker", None), renderer, max_samples=1, sandbox_type="local")
    assert docker.read_text("utf-8") == "asked\n"


@pytest.mark.usefixtures("docker")
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (in_sandboxes(None, "no-such"), {}, "no sandbox provider is called 'no-such'; known: .*docker"),
        (in_sandboxes(None), {"sandbox_type": "k8s"}, "known: .* pip install inspect-k8s-sandbox"),
        (
            in_sandboxes(None, task_sandbox=("docker", "gone.yaml")),
            {},
            "the sandbox's file .*/gone.yaml does not exist; correct the task, or pass sandbox_type",
        ),
    ],
)
def test_a_sandbox_that_cannot_start_is_known_before_the_first_episode(
    byte_model: Path, task: Task, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SandboxError, match=message):
        load_environment(task, bytes_renderer(byte_model), **options)


async def test_a_registered_provider_replaces_the_tasks_sandbox_or_is_one_samples_own(
    folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It gets its config file."""
    sandboxenv(name="noted")(_Noted)
    _Noted.configs.clear()
    task = Task(dataset=[SAMPLE], solver=generate(), scorer=has_text(), sandbox=("docker", "compose.yaml"))
    config = tmp_path_factory.mktemp("config") / "noted.cfg"
    config.write_text("x", encoding="utf-8")
    replaced = RunnerOptions(sandbox=SandboxConfig("noted", str(config)))
    own = Sample(input="x", target="hi", id="own", sandbox=("noted", "mine.cfg"))
    samples = Task(dataset=[own, Sample(input="x", target="hi", id="none")], scorer=match())
    for given, options in ((task, replaced), (samples, None)):
        info = load_inspect_task(given)
        async with TaskRunner(info, options) as runner:
            for sample in info.samples:
                assert score_episode(await runner.run(sample, Scripted("hi"))).reward == 1.0
    assert _Noted.configs == [str(config), "mine.cfg"]
