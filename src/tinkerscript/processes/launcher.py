"""`Launcher`: starts one process of a run somewhere; `LocalLauncher` does so on this machine.

Invariant: no process outlives this one. Its standard input is a pipe from here, which closes however this
process dies, and it then ends by itself (`--exit-with-parent`, or `processes.tether`). It runs in a session
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

from tinkerscript.lifecycle import describe_exit


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


@dataclass(frozen=True, slots=True)
class Order:
    """What to start."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    """What its environment has besides that of its machine."""

    log: Path
    """File of this machine to which its output is appended."""

    room: Room = Room()
    withheld: Sequence[str] = ()
    """Names of variables that its environment lacks of those of its machine."""


class Launcher(ABC):
    """Starts processes of a run."""

    address = "127.0.0.1"
    """At which the processes that it starts reach this machine."""

    shares_files = True
    """Whether those processes see the files of this machine."""

    @abstractmethod
    async def start(self, order: Order, on_start: Callable[[Started], None]) -> Started:
        """Start a process. `on_start` is called once it runs: there may have to be room for it first.

        Raises OSError or WorkerError if it cannot be started.
        """


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

    async def start(self, order: Order, on_start: Callable[[Started], None]) -> LocalProcess:
        port = free_port() if Slot.PORT in order.argv else 0
        own = {Slot.HOST: self.address, Slot.PORT: str(port)}
        with order.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(own.get(word, word) if isinstance(word, Slot) else word for word in order.argv),
                stdin=PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    name: value
                    for name, value in (os.environ | order.environ).items()
                    if name not in order.withheld
                },
            )
        started = LocalProcess(process, self.address, port)
        on_start(started)
        return started


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
