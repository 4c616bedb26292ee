"""A `Launcher` starts a `Child` of the run on some machine, `LocalLauncher` on this one.

A child ends when its standard input, a pipe from us, closes (`--exit-with-parent`, or `with_parent`), so none
outlives us. Each leads its own session, so that Ctrl-C reaches only us and a child's descendants can be
killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tinkerscript.lifecycle import DISK_FULL, describe_exit

MAX_RESTARTS = 10  # Per process, before the run gives up.


class Slot(StrEnum):
    """A placeholder that is filled in when the process starts."""

    CONFIG = "<config>"
    MODEL = "<model folder>"
    SERVER = "<server URL>"
    CLIENT = "<client uuid>"
    ADAPTERS = "<adapters>"
    MASTER = "<address of rank 0>"
    MASTER_PORT = "<port of rank 0>"
    HOST = "<host>"
    """The launcher fills in the machine's address and a port."""

    PORT = "<port>"
    KEY = "<API key>"


class Started(ABC):
    host: str
    port: int  # The value of `Slot.PORT`, free at the start.

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Negative for a signal; None while running."""

    @abstractmethod
    async def wait(self) -> int:
        """Returns the exit code. Raises WorkerError if the launcher fails."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Close the process's standard input."""

    @abstractmethod
    def kill(self) -> None: ...

    def describe_end(self) -> str:
        assert self.returncode is not None
        return describe_exit(self.returncode)


@dataclass(frozen=True, slots=True)
class Resources:
    cpus: float = 1.0
    gpus: int = 0


@dataclass
class Child:
    """Each start is an incarnation, numbered from 0."""

    name: str
    argv: Callable[[int], Sequence[str]]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    withheld: tuple[str, ...] = ()  # Removed from the environment.
    resources: Resources = field(default_factory=Resources)
    on_trainer_machine: bool = False
    max_restarts: int | None = None  # None: the supervisor's.
    on_start: Callable[[Started], None] = lambda process: None
    """The process runs, perhaps after a wait for room."""

    on_death: Callable[[int, int], None] = lambda incarnation, code: None
    """Gets the incarnation and its exit code."""

    may_restart: Callable[[], bool] = lambda: True
    fatal_codes: frozenset[int] = frozenset({2, DISK_FULL})
    """A restart would not help: bad configuration, a port in use, a full disk."""

    restarts: int = 0
    process: Started | None = field(default=None, repr=False)

    fds: Sequence[int] = ()  # Inherited on this machine.


class Launcher(ABC):
    address = "127.0.0.1"  # This machine, as started processes see it.
    shares_files = True

    @abstractmethod
    async def start(self, child: Child) -> Started:
        """Raises OSError or WorkerError."""


class LocalProcess(Started):
    def __init__(self, process: Process, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        code = await self._process.wait()
        self._kill_session()
        return code

    def ask_to_stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._kill_session()

    def _kill_session(self) -> None:
        # Descendants may outlive the process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LocalLauncher(Launcher):
    async def start(self, child: Child) -> LocalProcess:
        argv = child.argv(child.restarts)
        port = free_port() if Slot.PORT in argv else 0
        own = {Slot.HOST: self.address, Slot.PORT: str(port)}
        with child.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(own.get(word, word) if isinstance(word, Slot) else word for word in argv),
                stdin=PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=child.fds,
                env={
                    name: value
                    for name, value in (os.environ | child.environ).items()
                    if name not in child.withheld
                },
            )
        started = LocalProcess(process, self.address, port)
        child.on_start(started)
        return started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
