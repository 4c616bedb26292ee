"""What somebody new has: a folder with a first task, an agent and a config, and the package installed outside
of the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from command_line import ROOT, Command, start

END_S = 15.0
"""After Ctrl-C; 3 s on an idle machine, but other tests run beside these."""

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, accuracy, match, scorer
from inspect_ai.solver import generate

SAMPLES = [Sample(id=n, input=f"What is {n}+{n}?", target=str(2 * n)) for n in range(10, 40)]


@scorer(metrics=[accuracy()])
def half():
    async def score(state, target):
        return Score(value=0.5)
    return score


@task
def equal():
    return Task(dataset=SAMPLES, solver=generate(), scorer=half())


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


def environment(**more: str) -> dict[str, str]:
    """The caller's, without what points to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINKER"))}
    return {**kept, "COLUMNS": "100", **more}


BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "logs", "runs", "site"
)


class Installation:
    """The package as a wheel, and environments with it, in a folder that several processes may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def sdist(self) -> Path:
        """Made of a copy of the checkout: what an earlier build left there would come along."""
        with self._made("sdist") as folder:
            if folder is not None:
                copy = shutil.copytree(ROOT, folder / "checkout", ignore=NOT_SOURCE)
                build = [sys.executable, "-c", BUILD_SDIST, folder]
                subprocess.run(build, cwd=copy, check=True, env=environment(), capture_output=True)
        (path,) = (self._folder / "sdist").glob("tinkerscript-*.tar.gz")
        return path

    @property
    def wheel(self) -> Path:
        sdist = self.sdist
        with self._made("wheel") as folder:
            if folder is not None:
                build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
                subprocess.run([*build, sdist], check=True, env=environment())
        (path,) = (self._folder / "wheel").glob("tinkerscript-*.whl")
        return path

    def program(self, extras: str, *beside: str) -> Path:
        """The `tinkerscript` of an environment with these extras of the wheel, and packages `beside` it."""
        options = ["--constraint", str(ROOT / "constraints.txt"), *beside]
        return self._program(f"environment{extras}", options, extras)

    def whole(self) -> Path:
        """The `tinkerscript` of the wheel, over the packages of this environment, which has every extra.

        Another gigabyte takes a minute to install, and as long again to compile when it is first imported.
        """
        program = self._program("over", ["--no-deps"])
        with self._made("below") as folder:
            if folder is not None:
                (packages,) = (program.parents[1] / "lib").glob("python*/site-packages")
                (packages / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return program

    def _program(self, name: str, options: list[str], extras: str = "") -> Path:
        wheel = self.wheel
        with self._made(name) as folder:
            if folder is not None:
                subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
                python = str(folder / "bin" / "python")
                install = [sys.executable, ROOT / "dev" / "install.py", "--python", python]
                subprocess.run([*install, *options, f"{wheel}{extras}"], check=True, env=environment())
        return self._folder / name / "bin" / "tinkerscript"

    @contextmanager
    def _made(self, name: str) -> Iterator[Path | None]:
        """The folder to make, or None if it is made; one process makes it, others wait."""
        folder = self._folder / name
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self._folder / f"{name}.done"
            if done.exists():
                yield None
                return
            folder.mkdir()
            yield folder
            done.touch()


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


def interrupted(command: Command) -> tuple[int, float]:
    """The exit code after Ctrl-C, and the seconds until it ended."""
    began = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    return command.wait(), time.monotonic() - began
