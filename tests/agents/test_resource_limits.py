"""What a sandbox may use: a memory hog, a fork bomb and a long file end in their own sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import ComposeConfig, SandboxEnvironmentSpec, sandbox
from sandboxes import run, started

from inspect_tinker_bridge import GenerateRequest, TaskRunner, load_inspect_task
from interchange_helpers import eventually
from tinkerscript.errors import IsolationError
from tinkerscript.isolation import bubblewrap
from tinkerscript.isolation.bubblewrap import Bubblewrap, ResourceLimits, group_parents
from tinkerscript.isolation.inspect_sandbox import BubblewrapSettings, settings_of

LIMITS = ResourceLimits(memory_mb=200, processes=40, file_mb=5)
HOG = ("python3", "-c", "print(len(bytearray(400 * 2**20)))")
BOMB = """python3 - <<EOF
import os, time
while True:
    try:
        if os.fork() == 0:
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            while True:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.01)
    except OSError:
        print("lit")
        break
EOF
"""
"""Processes that start processes for as long as they may."""

LONG = "head -c 20000000 /dev/zero > long; stat -c %s long"


def groups(mark: str) -> list[Path]:
    return [group for parent in group_parents() for group in parent.glob(f"*{mark}*")]


async def check_limits() -> None:
    """Each limit is kept, and by one sandbox alone."""
    async with started(LIMITS) as limited, started() as free:
        status, said = await run(limited, *HOG)
        assert status == -9 or "MemoryError" in said, said
        assert await run(free, *HOG) == (0, f"{400 * 2**20}\n")
        assert (await run(limited, "sh", "-c", LONG))[1].splitlines()[-1] == str(5 * 2**20)
        assert (await run(free, "sh", "-c", LONG))[1] == "20000000\n"
        assert await run(limited, "sh", "-c", BOMB) == (0, "lit\n")
        counted = (
            "import subprocess; print(len([subprocess.Popen(['sleep', '9'], stdout=-3) for _ in range(100)]))"
        )
        assert await run(free, "python3", "-c", counted) == (0, "100\n")
        status, said = await run(limited, "python3", "-c", counted)
        assert status == 1
        assert "unavailable" in said
        await limited.start()
        assert await run(limited, "echo", "again") == (0, "again\n")


async def test_limits_are_kept_by_each_sandbox_alone() -> None:
    assert group_parents() or os.geteuid(), "root without control groups"
    await check_limits()


async def test_without_control_groups_a_user_has_limits_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a user who is not root, and so can make no groups."""
    folder = tmp_path_factory.getbasetemp().parent.parent / f"of-nobody-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        f"import asyncio; from {__name__} import check_limits; asyncio.run(check_limits())"
    )
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    try:
        process = await asyncio.create_subprocess_exec(
            *nobody,
            *(sys.executable, "-c", code),
            env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder)},
            stderr=subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert process.returncode == 0, said.decode()[-3000:]

        async def swept() -> bool:
            return not [*folder.glob("tinkerscript-sandboxes-*")]

        await eventually(swept, "the end of the sandboxes' files")
    finally:
        shutil.rmtree(folder)


async def test_a_limit_that_nothing_enforces_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 16"):
        ResourceLimits(processes=3)
    monkeypatch.setattr(bubblewrap, "_MOUNT", tmp_path / "none")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(IsolationError, match="root can limit them only by control groups"):
        Bubblewrap(ResourceLimits(processes=40))


_KILLED = """
import asyncio, os, signal
from tinkerscript.isolation.bubblewrap import Bubblewrap
from tinkerscript.isolation.bubblewrap import ResourceLimits

async def main():
    sandbox = Bubblewrap(ResourceLimits(memory_mb=200, processes=40))
    await sandbox.start()
    bomb = await asyncio.create_subprocess_exec(*sandbox.command(["sh", "-c", BOMB]))
    await bomb.wait()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_nothing_stays_of_a_bomb_whose_worker_is_killed(tmp_path: Path) -> None:
    """Nor of a folder that it may not open."""
    bomb = f"mkdir d; touch d/f; chmod 0 d\n{BOMB}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _KILLED.replace("BOMB", repr(bomb))),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert (process.returncode, said) == (-9, b"lit\n")

    async def nothing_left() -> bool:
        return not [*tmp_path.iterdir()] and not groups("tinkerscript-sandboxes-")

    await eventually(nothing_left, "the end of the bomb, its files and its control groups")


@solver
def obeys() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().exec(["sh", "-c", state.input_text])
        return state

    return solve


@scorer(metrics=[accuracy()])
def whole() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=1.0, answer=await sandbox().read_file("/etc/hosts"))

    return score


SETTINGS = BubblewrapSettings(memory_mb=200, processes=40, environment={"WHO": "me"}, working_dir="/app/it")


def obedient() -> Task:
    orders = {"bomb": BOMB, "hog": "exec " + " ".join(f"'{word}'" for word in HOG), "good": "test $WHO = me"}
    place = SandboxEnvironmentSpec("bubblewrap", SETTINGS)
    samples = [Sample(id=name, input=order, sandbox=place) for name, order in orders.items()]
    return Task(dataset=samples, solver=obeys(), scorer=whole())


class Silent:
    async def generate(self, request: GenerateRequest) -> Any:
        raise AssertionError


async def test_a_bomb_and_a_hog_are_failures_of_their_own_episodes() -> None:
    """Beside an episode that ends as it should."""
    info = load_inspect_task(obedient())
    samples = info.samples
    async with TaskRunner(info) as runner:
        outcomes = await asyncio.gather(*(runner.run(sample, Silent()) for sample in samples))
    bomb, hog, good = outcomes
    assert "unavailable" in (bomb.error or ""), bomb
    assert not bomb.scores
    for each in (hog, good):
        assert each.error is None
        assert each.scores["whole"].value == 1.0
    assert groups("tinkerscript-sandboxes-") == []


def test_compose_settings_are_honored_or_refused() -> None:
    def compose(**service: Any) -> ComposeConfig:
        return ComposeConfig.model_validate({"services": {"default": {"image": "x", **service}}})

    listed = compose(mem_limit="6144m", pids_limit=64, environment=["A=1=2", "B"], working_dir="/app")
    assert settings_of(listed) == BubblewrapSettings(
        memory_mb=6144, processes=64, environment={"A": "1=2"}, working_dir="/app"
    )
    assert settings_of(compose(mem_limit="2g", pids_limit=-1)) == BubblewrapSettings(memory_mb=2048)
    assert settings_of(compose(mem_limit="1048576")) == BubblewrapSettings(memory_mb=1)
    with pytest.raises(IsolationError, match="cannot honor the Compose settings privileged, volumes"):
        settings_of(compose(privileged=True, volumes=["/:/host"]))
    two = ComposeConfig.model_validate({"services": {"a": {}, "b": {}}})
    with pytest.raises(
        IsolationError, match="Compose settings have the services a, b; this sandbox runs one"
    ):
        settings_of(two)
    with pytest.raises(IsolationError, match=r"not 'compose.yaml'"):
        settings_of("compose.yaml")
