"""`Launcher`: starts a `Child` of the run somewhere; `LocalLauncher` does so on this machine.

Invariant: no process outlives this one. Its standard input is a pipe from here, which closes however this
process dies, and it then ends by itself (`--exit-with-parent`, or `with_parent`). It runs in a session
of its own: Ctrl-C reaches only this process, which stops it in order, and what it has started ends with it.
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
"""How often a process that died is started again before the run gives up."""


class Slot(StrEnum):
    """A word of a planned command, or a value of its environment, that is known when the process starts."""

    CONFIG = "<config>"
    MODEL = "<model folder>"
    SERVER = "<server URL>"
    CLIENT = "<client uuid>"
    ADAPTERS = "<adapters>"
    MASTER = "<address of rank 0>"
    MASTER_PORT = "<port of rank 0>"
    HOST = "<host>"
    """Filled in by the launcher, as is the port: an address of the machine on which the process starts."""

    PORT = "<port>"
    KEY = "<API key>"


class Started(ABC):
    """A process that a launcher has started."""

    host: str
    """What it got for `Slot.HOST`."""

    port: int
    """What it got for `Slot.PORT`: free when it was started."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    @abstractmethod
    async def wait(self) -> int:
        """Its exit code, when it has ended. Raises WorkerError if its launcher fails."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Close its standard input, at which it stops by itself."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it, and whatever it has started."""

    def describe_end(self) -> str:
        """How it ended, for a message."""
        assert self.returncode is not None
        return describe_exit(self.returncode)


@dataclass(frozen=True, slots=True)
class Room:
    """What a process takes of a machine."""

    cpus: float = 1.0
    gpus: int = 0


@dataclass
class Child:
    """A process of a run; `argv` is called for each incarnation, numbered from 0."""

    name: str
    argv: Callable[[int], Sequence[str]]
    log: Path
    """File of this machine to which its output is appended."""

    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Variables that are added to the environment of its machine."""

    withheld: tuple[str, ...] = ()
    """Names of variables of that environment that it does not get."""

    room: Room = field(default_factory=Room)
    is_beside: bool = False
    """Whether it has to run on this machine, whatever launcher its supervisor uses."""

    max_restarts: int | None = None
    """None: as often as its supervisor says."""

    on_start: Callable[[Started], None] = lambda process: None
    """Called once it runs: there may have to be room for it first."""

    on_death: Callable[[int, int], None] = lambda incarnation, code: None
    """Called with the number of the incarnation that died, and its exit code."""

    may_restart: Callable[[], bool] = lambda: True
    """Whether it can be started again now; asked until it can."""

    fatal_codes: frozenset[int] = frozenset({2, DISK_FULL})
    """Exit codes after which a restart does not help: bad configuration, a port in use, a full disk."""

    restarts: int = 0
    retired: bool = False
    """Whether it is no longer needed, and not started again."""

    process: Started | None = field(default=None, repr=False)

    fds: Sequence[int] = ()
    """Open files of this process that it inherits, if it runs on this machine."""


class Launcher(ABC):
    """Starts processes of a run."""

    address = "127.0.0.1"
    """At which the processes that it starts reach this machine."""

    shares_files = True
    """Whether those processes see the files of this machine."""

    @abstractmethod
    async def start(self, child: Child) -> Started:
        """Start its next incarnation. Raises OSError or WorkerError if it cannot be started."""


class LocalProcess(Started):
    """A child process of this one."""

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
        """Kill it and whatever it started, also when it has died itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LocalLauncher(Launcher):
    """Starts child processes of this one."""

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
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
