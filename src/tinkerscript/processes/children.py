"""The server, the engine of a served model, and the workers of a run, as child processes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinkerscript.access_tokens import CLIENT_TOKEN, reached_through, read_token
from tinkerscript.addresses import remote_url
from tinkerscript.config import InterchangeConfig, RunConfig
from tinkerscript.errors import EngineError, LinkError, WorkerError
from tinkerscript.lifecycle import own_command, try_lock
from tinkerscript.processes.launcher import Child, Launcher, LocalProcess, Slot, free_port
from tinkerscript.processes.planned import TRAINER_PROCESS, PlannedProcess, worker_arguments
from tinkerscript.processes.supervisor import Supervisor
from tinkerscript.trainer_link.keys import TrainerKeys, load_trainer_keys
from tinkerscript.trainer_link.trainer_end import TrainerLink

SERVER_START_S = 60.0

FORMER_SERVER_S = 20.0  # A dead trainer's server must end within this.

CHILD_POLL_S = 0.02

RANK_ERROR_S = 5.0  # A rank's death is noticed within this.

IDLE_S = 60.0
"""An idle worker beyond `workers.count` stops after this."""

SCALE_S = 1.0  # The server reports the demand once a second.

LOCAL_WORKERS = "local_workers"
"""In the run folder: the trainer's workers, one per line."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    url: str
    link_address: str
    link_keys: Path | None

    def seen_from(self, address: str, section: InterchangeConfig) -> str:
        if section.public_base_url:
            return section.public_base_url
        if section.interchange_server_host not in ("0.0.0.0", "::"):
            return self.url
        parts = urlsplit(self.url)
        host = f"[{address}]" if ":" in address else address
        return f"{parts.scheme}://{host}:{parts.port}"

    def trainer_keys(self) -> TrainerKeys | None:
        """Raises ConfigError."""
        return None if self.link_keys is None else load_trainer_keys(self.link_keys)


def engine_child(checkpoint: Path, address: ServerAddress, folder: Path) -> Child:
    keys = ["--link-keys", str(address.link_keys)] if address.link_keys else []
    options = ["--checkpoint", str(checkpoint), "--link", address.link_address, *keys]

    def argv(_: int) -> list[str]:
        return own_command("engine", *options)

    return Child("engine", argv, folder / "logs" / "engine.log")


async def former_server_gone(folder: Path) -> None:
    """Raises LinkError if a dead trainer's server does not end."""
    deadline = time.monotonic() + FORMER_SERVER_S
    while (lock := try_lock(folder / "server.lock")) is None:
        if time.monotonic() > deadline:
            raise LinkError(f"another interchange server still serves {folder}")
        await asyncio.sleep(CHILD_POLL_S)
    lock.close()


async def server_address(
    folder: Path, server: Child, supervisor: Supervisor, *, patience_s: float = 0.0
) -> ServerAddress:
    """Wait up to `SERVER_START_S + patience_s` seconds for `server` to listen.

    Raises LinkError, or the supervisor's error.
    """
    limit_s = SERVER_START_S + patience_s
    deadline = time.monotonic() + limit_s
    path = folder / "server.json"
    watch = asyncio.create_task(supervisor.failed())
    try:
        while (data := _written_by(server, path)) is None:
            if time.monotonic() > deadline:
                raise LinkError(f"the interchange server did not write {path} within {limit_s:.0f} s")
            await asyncio.wait({watch}, timeout=CHILD_POLL_S)
            if watch.done():
                await watch
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    keys = data.get("link_keys")
    return ServerAddress(data["url"], data["link_address"], Path(keys) if keys else None)


def _written_by(server: Child, path: Path) -> dict[str, Any] | None:
    """Return None for a missing file or an earlier process's."""
    if not path.exists() or server.process is None:
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    assert isinstance(server.process, LocalProcess)
    return data if data["pid"] == server.process.pid else None


def worker_command(config: RunConfig, url: str) -> str:
    """Return the command for another machine, run in a folder with the script or the task's file."""
    interchange = config.interchange_server
    remote = interchange.public_base_url or remote_url(url, interchange.interchange_server_host)
    what = shlex.join(worker_arguments(config, elsewhere=True)) or "SCRIPT"
    text = f"tinkerscript worker {what} --server {remote}"
    return f"{text}\n  (with {CLIENT_TOKEN} in its environment)" if reached_through(interchange) else text


def remember_worker(folder: Path, name: str) -> None:
    with (folder / LOCAL_WORKERS).open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")


def release_former_workers(folder: Path, link: TrainerLink) -> None:
    """Release the claims of workers that died with a former trainer."""
    path = folder / LOCAL_WORKERS
    if path.exists():
        for name in path.read_text(encoding="utf-8").split():
            link.release_client(name, "the trainer that started this worker has ended")
        path.unlink()


@asynccontextmanager
async def launched_ranks(
    plan: Sequence[PlannedProcess], launcher: Launcher, folder: Path, note: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Run the trainer's ranks above 0 on other machines, with this process as rank 0, as torchrun would.

    On one machine the engine starts the ranks itself. Raises ChildFailedError.
    """
    ranks = [process for process in plan if process.name.startswith(f"{TRAINER_PROCESS} rank ")]
    if not ranks or launcher.shares_files:
        yield
        return
    values: dict[str, str] = {Slot.MASTER: launcher.address, Slot.MASTER_PORT: str(free_port())}
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(len(ranks) + 1),
        MASTER_ADDR=values[Slot.MASTER],
        MASTER_PORT=values[Slot.MASTER_PORT],
    )
    async with Supervisor(max_restarts=0, note=note, launcher=launcher) as supervisor:
        for process in ranks:
            await supervisor.start(process.child(folder, lambda incarnation: values))
        try:
            yield
        except EngineError:
            with suppress(TimeoutError):  # The rank's own log says more.
                await asyncio.wait_for(supervisor.failed(), RANK_ERROR_S)
            raise


class Workers:
    """Runs as many workers as the run needs.

    A worker with a claim is never stopped for lack of demand.
    """

    def __init__(
        self,
        planned: Sequence[PlannedProcess],
        config: RunConfig,
        folder: Path,
        *,
        link: TrainerLink,
        server_url: str,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planned = planned
        self._config = config.workers
        self._folder = folder
        self._link = link
        self._server_url = server_url
        self._supervisor = supervisor
        self._clock = clock
        self._secrets = worker_secrets(os.environ)
        self._running: dict[int, Child] = {}
        self._names: dict[int, list[str]] = {number: [] for number in range(len(planned))}
        self._needed_at = clock()

    @property
    def number(self) -> int:
        return len(self._running)

    async def start(self) -> None:
        for number, process in enumerate(self._planned):
            if not process.on_demand:
                await self._start(number)

    async def follow_demand(self, pause_s: float = SCALE_S) -> None:
        try:
            while self._config.max_count > self._config.count:
                await asyncio.sleep(pause_s)
                await self.scale()
        except (OSError, WorkerError) as error:
            self._supervisor.fail(error)

    async def scale(self) -> None:
        demand = self._link.demand
        episodes = demand.waiting + sum(demand.own_claims.values())
        wanted = max(-(-episodes // self._config.concurrency), self._config.count)
        for number in range(len(self._planned)):
            if self.number < wanted and number not in self._running:
                await self._start(number)
        if wanted >= self.number:
            self._needed_at = self._clock()
        elif self._clock() - self._needed_at >= IDLE_S:
            await self._stop_idle(self.number - wanted, demand.own_claims)

    async def _stop_idle(self, at_most: int, claims: Mapping[str, int]) -> None:
        idle = [number for number in self._running if self._names[number][-1] not in claims]
        spare = [number for number in sorted(idle, reverse=True) if self._planned[number].on_demand]
        chosen = [self._running.pop(number) for number in spare[:at_most]]
        await asyncio.gather(*(self._supervisor.retire(child) for child in chosen))

    async def _start(self, number: int) -> None:
        names = self._names[number]
        first = len(names)

        def values(incarnation: int) -> dict[str, str]:
            name = f"{self._link.own_clients}{number}-{first + incarnation}"
            if name not in names:
                names.append(name)
                remember_worker(self._folder, name)
            return {Slot.SERVER: self._server_url, Slot.CLIENT: name}

        def on_death(incarnation: int, code: int) -> None:
            self._link.release_client(names[first + incarnation], f"worker {number} died with code {code}")

        child = self._planned[number].child(self._folder, values, self._secrets)
        child.on_death = on_death
        self._running[number] = child
        await self._supervisor.start(child)


def worker_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    token = read_token(environ, CLIENT_TOKEN)
    return {**environ, **({CLIENT_TOKEN: token} if token else {})}
