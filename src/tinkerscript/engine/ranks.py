"""`Ranks`: rank 0's connections to the other ranks of an engine on several devices, and their processes.

Rank 0 starts them unless a launcher such as torchrun did. They connect through a Unix socket in a private
folder, or after a launcher through TCP, with a secret from torch's store.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from tinkerscript.engine.quantization import Quantization
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.lifecycle import ORPHAN_GRACE_S, describe_exit, exit_hard_after, last_lines

Sharding = Literal["replicate", "shard"]

FOLDER_VARIABLE = "TINKERSCRIPT_RANKS"
"""Private folder with rank 0's socket and torch's store, if rank 0 started the others."""

CONTROL_KEY = "tinkerscript/control"

START_S = 600.0

GROUP_TIMEOUT_S = 600.0

NAMING_S = 5.0
"""Seconds that a failed operation waits for news of a dead rank."""

RANK_GRACE_S = ORPHAN_GRACE_S + 1
"""Seconds for a follower to exit by itself."""

ANSWER_POLL_S = 0.02
"""Seconds between turns of sampling while rank 0 waits."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankSpec:
    folder: Path
    device: str
    dtype: torch.dtype
    autocast: torch.dtype
    quantization: Quantization
    lora: LoraSettings | None
    sharding: Sharding
    activation_checkpointing: bool
    threads: int
    timeout_s: float

    @property
    def own_device(self) -> str:
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.device == "cuda" else self.device

    def join(self, store: Store, rank: int, size: int) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(torch.device(self.own_device))
        dist.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=self.timeout_s),
        )


def check_devices(devices: int, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.device: {device!r} cannot be shared out over engine.devices: {devices}; use cpu or cuda"
        )
    ours = int(os.environ.get("LOCAL_RANK", "0")) + 1 if is_launched() else devices
    if device == "cuda" and ours > (there := torch.cuda.device_count()):
        raise ConfigError(f"engine.devices: {devices} takes {ours} CUDA devices here, and there are {there}")


def is_launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and FOLDER_VARIABLE not in os.environ


class Ranks:
    """Belongs to the computing thread, except `failure` and `close`."""

    def __init__(self, size: int, spec: RankSpec, log_dir: Path | None = None) -> None:
        self.size, self.spec = size, spec
        self.failure: Future[None] = Future()
        self._answers: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._answered: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = Lock()
        self._is_closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="tinkerscript-"))
        self._log_dir = log_dir or self._folder
        if is_launched():
            self._store = _launchers_store()
            secret = secrets.token_bytes(32)
            self._listener = Listener(("", 0), backlog=size, authkey=secret)
            where = [os.environ["MASTER_ADDR"], self._listener.address[1], secret.hex()]
            self._store.set(CONTROL_KEY, json.dumps(where))
        else:
            self._store = FileStore(str(self._folder / "store"), size)
            self._listener = Listener(str(self._folder / "control"), backlog=size)
            for rank in range(1, size):
                self._start(rank)
        self._begin(self._admit)

    def join(self) -> None:
        if self.answers(START_S) is None:
            missing = sorted(set(range(1, self.size)) - self._answered.keys())
            raise self.fail(EngineError(f"the ranks {missing} did not join within {START_S:.0f} s"))
        with self.computing():
            self.tell("join", [()] * (self.size - 1))
            self.spec.join(self._store, 0, self.size)

    def tell(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._raise_failure()
        for rank, each in enumerate(arguments, start=1):
            self._connections[rank].send((method, each))

    def answers(self, within_s: float | None = None) -> list[Any] | None:
        """Return the followers' results by rank, or None after `within_s`."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while len(self._answered) < self.size - 1:
            self._raise_failure()
            try:
                answer = self._answers.get(timeout=deadline and max(0.0, deadline - time.monotonic()))
            except Empty:
                return None
            if answer is not None:
                self._answered[answer[0]] = answer[1]
        answered, self._answered = self._answered, {}
        return [answered[rank] for rank in sorted(answered)]

    def together(self, method: str, arguments: tuple[Any, ...], here: Callable[[], T]) -> tuple[T, list[Any]]:
        """Call a method on all ranks, here as `here`. Returns this rank's result, and the others'."""
        with self.computing():
            self.tell(method, [arguments] * (self.size - 1))
            result = here()
            return result, self.answers() or []

    @contextmanager
    def computing(self) -> Generator[None]:
        """All ranks compute in this block. An error ends them all."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (RuntimeError, OSError)):  # A dead rank may be the cause.
                wait([self.failure], timeout=NAMING_S)
            raise self.fail(EngineError(f"rank 0: {type(error).__name__}: {error}")) from error

    def fail(self, error: EngineError) -> EngineError:
        """End all ranks. Returns the first error."""
        with self._lock:
            first = not self.failure.done() and not self._is_closed
            if first:
                self.failure.set_exception(error)
        if first:
            self._answers.put(None)
            for process in self._processes.values():
                process.kill()
            self._disconnect()
            if self.spec.device == "cuda" and dist.is_initialized():
                group: Any = dist.group.WORLD
                group.abort()  # NCCL's operations outlive the connections.
        found = self.failure.exception() if self.failure.done() else None
        return found if isinstance(found, EngineError) else error

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + RANK_GRACE_S
        for rank, process in self._processes.items():
            if rank not in self._connections:
                process.kill()
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._disconnect()
        self._listener.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> None:
        number = str(rank)
        own = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": str(self.size),
            FOLDER_VARIABLE: str(self._folder),
        }
        with self._log_of(rank).open("ab") as log:
            # Ctrl-C must reach only rank 0.
            process = self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "tinkerscript", "rank"],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._begin(self._watch, rank, process)

    def _log_of(self, rank: int) -> Path:
        return self._log_dir / f"rank-{rank}.log"

    def _begin(self, target: Callable[..., None], *arguments: Any) -> None:
        Thread(target=target, args=arguments, name=f"ranks-{target.__name__}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        end = describe_exit(process.wait())
        log = self._log_of(rank)
        self._lose(rank, f"ended ({end}); the end of {log}:\n{last_lines(log)}")

    def _admit(self) -> None:
        while len(self._connections) < self.size - 1:
            try:
                connection = self._listener.accept()
                rank = connection.recv()
                connection.send(self.spec)
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # A stranger, or a dead rank.
            except OSError:
                return  # The listener is closed.
            self._connections[rank] = connection
            self._begin(self._read, rank, connection)
        self._listener.close()

    def _read(self, rank: int, connection: Connection) -> None:
        _notice_a_lost_host(connection)
        try:
            while True:
                self._answers.put((rank, connection.recv()))
        except (EOFError, OSError):
            if rank not in self._processes:
                self._lose(rank, "closed its connection; its launcher has its exit code and its log")

    def _lose(self, rank: int, what: str) -> None:
        self.fail(EngineError(f"rank {rank} of {self.size} {what}"))

    def _raise_failure(self) -> None:
        if self.failure.done():
            self.failure.result()
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _disconnect(self) -> None:
        for connection in list(self._connections.values()):
            # Closing would not wake the reading thread.
            with suppress(OSError), _socket_of(connection) as end:
                end.shutdown(socket.SHUT_RDWR)


def receive(connection: Connection, messages: SimpleQueue[Any]) -> None:
    with suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            messages.put(message)
    exit_hard_after(ORPHAN_GRACE_S)  # A collective operation may hang.
    messages.put(None)


def meet(size: int) -> tuple[Store, Connection]:
    if folder := os.environ.get(FOLDER_VARIABLE):
        return FileStore(f"{folder}/store", size), Client(f"{folder}/control")
    store = _launchers_store()
    host, port, secret = json.loads(store.get(CONTROL_KEY))
    connection = Client((host, port), authkey=bytes.fromhex(secret))
    _notice_a_lost_host(connection)
    return store, connection


def _launchers_store() -> Store:
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise EngineError(f"torch's store at MASTER_ADDR:MASTER_PORT, {where}: {error}") from error
    return store


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _notice_a_lost_host(connection: Connection) -> None:
    """Fail within 10 seconds if the other machine stops answering."""
    with _socket_of(connection) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 2)):
                if hasattr(socket, name):
                    end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
