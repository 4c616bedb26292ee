"""The processes of a chaos run: started, killed with SIGKILL, started again, and all ended at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkerscript.addresses import SERVER_FILE, ServerInfo, read_server_info
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.http_server import OTHER_FILES

HERE = Path(__file__).parent
POLL_S = 0.02
START_S = 60.0
FEW_FILES = ("prlimit", f"--nofile={200 + OTHER_FILES}")
"""Prefix of a command whose server has room for 200 connections, which hostile clients exceed."""


class ChaosError(AssertionError):
    """The run itself went wrong: a process ended by itself, or nothing moved any more."""


@dataclass
class Victim:
    """One process that is killed and started again."""

    name: str
    command: Sequence[str]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"} | self.environ,
            )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def check(self) -> None:
        """Raises ChaosError if it has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            raise ChaosError(f"{self.name} ended by itself with {self.process.returncode}:\n{self._tail()}")

    def where(self) -> str:
        """What each of its threads is doing. It does not survive the question."""
        self.send(signal.SIGABRT)
        assert self.process is not None
        self.process.wait()
        return self._tail()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def write_config(run_dir: Path, **interchange: Any) -> None:
    """The run folder of a server that hands out an episode as often as it is lost."""
    section = {"interchange_server_port": 0, "max_attempts": 100} | interchange
    config = RunConfig.model_validate({"interchange_server": section})
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(config))


def serving_info(run_dir: Path) -> ServerInfo | None:
    """Where the server of a run is: one that has the run's folder, or one of several in folders below it.

    Each of those writes its `server.json` when it begins to serve.
    """
    found = sorted(run_dir.glob(f"*/{SERVER_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    return read_server_info(found[-1].parent if found else run_dir)


def server(run_dir: Path, environ: Mapping[str, str] | None = None) -> Victim:
    command = [*FEW_FILES, sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(run_dir)]
    return Victim("server", command, run_dir / "server.log", environ or {})


def script(
    name: str, run_dir: Path, *options: object, log: str = "", environ: Mapping[str, str] | None = None
) -> Victim:
    """One of the scripts beside this file."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--run-dir", str(run_dir), *map(str, options)]
    return Victim(log or name, command, run_dir / f"{log or name}.log", environ or {})


def until(condition: Callable[[], bool], what: str, *, seconds: float = START_S) -> None:
    """Wait for a condition. Raises ChaosError that says for what it waited."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ChaosError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_S)


def listening(run_dir: Path, victim: Victim) -> ServerInfo:
    """Wait until this incarnation of the server listens."""

    def written() -> bool:
        victim.check()
        info = read_server_info(run_dir)
        return info is not None and victim.process is not None and info.pid == victim.process.pid

    try:
        until(written, "the server's start")
    except ChaosError as error:
        raise ChaosError(f"{error}; it is at\n{victim.where()}") from error
    info = read_server_info(run_dir)
    assert info is not None
    return info


@contextmanager
def ended_at_last(victims: list[Victim]) -> Generator[None]:
    """However the block ends, none of the victims lives on."""
    try:
        yield
    finally:
        for victim in victims:
            if victim.process is not None and victim.process.poll() is None:
                os.killpg(victim.process.pid, signal.SIGKILL)  # With what it has started.
                victim.process.wait()
