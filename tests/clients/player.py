"""`Player`: a client's program in an interpreter of its own, which plays one feature at a time.

`Players` starts each program once, when it is first asked for, in the environment that has its library.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roster import Client

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = Path(__file__).parents[2] / ".venv-tests"
"""Where `make acceptance` installs the clients; CLIENTS_ENVIRONMENT names another folder."""

START_S = 120.0
FEATURE_S = 60.0

# A program must find the model by the job's base URL and key alone, and tell nobody that it ran.
_QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")


@dataclass
class Outcome:
    """What a program's feature returned, or the error of its library."""

    value: dict[str, Any]
    version: str
    """Of the client's library."""

    error: str


class Player:
    """A started program."""

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    async def play(self, client: Client, feature: str, url: str, key: str) -> Outcome:
        """Run `feature` against the model at `url`; fails with the program's output if it does not end."""
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        job = {
            "feature": feature,
            "environ": dict(zip(client.environ, (url, key), strict=True)) | {"CLIENT_API": client.api},
            "package": client.package,
            "snippet": client.snippet,
            "result": str(result),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self.line(FEATURE_S)
        assert result.exists(), f"{feature} left no result:\n{self.output()}"
        outcome = json.loads(result.read_text())
        return Outcome(outcome.get("value") or {}, outcome.get("version", ""), outcome.get("error", ""))

    async def line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise AssertionError(f"the program did not answer in {seconds:g} s:\n{self.output()}") from None
        assert line, f"the program ended:\n{self.output()}"
        return line

    def output(self) -> str:
        return (self._folder / "stderr.txt").read_text(errors="replace")[-6000:]


@asynccontextmanager
async def open_player(python: Path, program: str, folder: Path) -> AsyncGenerator[Player]:
    """The program `program`.py under the interpreter `python`; it and its forks end with the context."""
    environ = {name: os.environ[name] for name in _KEPT if name in os.environ} | _QUIET
    environ["HOME"] = str(folder)
    with (folder / "stderr.txt").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            python,
            PROGRAMS / f"{program}.py",
            cwd=folder,
            env=environ,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield Player(process, folder)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


class Players:
    """The programs of a session; they end with `stack`."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._environment = Path(os.environ.get("CLIENTS_ENVIRONMENT", ENVIRONMENT))
        self._started: dict[str, Player] = {}

    async def get(self, client: Client) -> Player:
        """The client's program, its library loaded."""
        if client.program not in self._started:
            python = Path(sys.executable) if client.uses_project else self._environment / "bin" / "python"
            assert python.exists(), f"{python} does not exist; run `make {ENVIRONMENT.name}/.installed`"
            folder = self._folder / client.program
            folder.mkdir()
            player = await self._stack.enter_async_context(open_player(python, client.program, folder))
            await player.line(START_S)
            self._started[client.program] = player
        return self._started[client.program]
