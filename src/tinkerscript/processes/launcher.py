"""`Launcher` starts a `Child` of the run on some machine, `LocalLauncher` on this one.

Invariant: no process outlives this one. A child's standard input is a pipe that closes when this
process dies, and the child then ends (`--exit-with-parent`, or `with_parent`). Each child has its own
session, so that Ctrl-C only reaches this process, which stops the children in order, and so that a
child's descendants can be killed with it.
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

MAX_RESTARTS = 10
"""The number of restarts of a process before the run gives up."""


class Slot(StrEnum):
    """A placeholder in a planned command or environment, replaced when the process starts."""

    CONFIG = "<config>"
    MODEL = "<model folder>"
    SERVER = "<server URL>"
    CLIENT = "<client uuid>"
    ADAPTERS = "<adapters>"
    MASTER = "<address of rank 0>"
    MASTER_PORT = "<port of rank 0>"
    HOST = "<host>"
    """An address of the machine on which the process starts. The launcher replaces it, and the port."""

    PORT = "<port>"
    KEY = "<API key>"


class Started(ABC):
    """A process that was started by a launcher."""

    host: str
    port: int
    """The value of `Slot.PORT`, which was free when the process started."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the end of the process and return its exit code. Raises WorkerError if the launcher
        fails."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Close the standard input of the process, upon which it stops."""

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
    """A process of a run, in incarnations numbered from 0. `argv` returns the command of each."""

    name: str
    argv: Callable[[int], Sequence[str]]
    log: Path
    """The file on this machine that receives the output."""

    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Variables added to the environment of the process's machine."""

    withheld: tuple[str, ...] = ()
    """Names of that environment's variables that are removed."""

    resources: Resources = field(default_factory=Resources)
    on_trainer_machine: bool = False
    """Whether the process must run on this machine, regardless of the supervisor's launcher."""

    max_restarts: int | None = None
    """The maximum number of restarts, or None for the supervisor's."""

    on_start: Callable[[Started], None] = lambda process: None
    """Called when the process runs, which may be later than its start if it waits for room."""

    on_death: Callable[[int, int], None] = lambda incarnation, code: None
    """Called with the number of the dead incarnation and its exit code."""

    may_restart: Callable[[], bool] = lambda: True
    """Whether the process may restart now. It is polled until it returns true."""

    fatal_codes: frozenset[int] = frozenset({2, DISK_FULL})
    """Exit codes after which a restart is useless: bad configuration, a port in use, a full disk."""

    restarts: int = 0
    retired: bool = False
    """Whether the process is no longer needed, so that it is not restarted."""

    process: Started | None = field(default=None, repr=False)

    fds: Sequence[int] = ()
    """Open files that the process inherits on this machine."""


class Launcher(ABC):
    """Starts processes of a run on one or more machines."""

    address = "127.0.0.1"
    """The address of this machine for the started processes."""

    shares_files = True

    @abstractmethod
    async def start(self, child: Child) -> Started:
        """Start the next incarnation of `child`. Raises OSError or WorkerError."""


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
