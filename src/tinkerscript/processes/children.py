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
from tinkerscript.config import EngineConfig, InterchangeConfig, RunConfig
from tinkerscript.errors import EngineError, LinkError
from tinkerscript.lifecycle import own_command, try_lock
from tinkerscript.processes.launcher import Child, Launcher, LocalProcess, Slot, free_port
from tinkerscript.processes.planned import TRAINER_PROCESS, PlannedProcess, worker_arguments
from tinkerscript.processes.supervisor import Supervisor
from tinkerscript.trainer_link.keys import TrainerKeys, load_trainer_keys
from tinkerscript.trainer_link.trainer_end import TrainerLink

SERVER_START_S = 60.0

FORMER_SERVER_S = 20.0  # Time for a dead trainer's server to end.

CHILD_POLL_S = 0.02

RANK_ERROR_S = 5.0  # Time to notice a rank's death.

LOCAL_WORKERS = "local_workers"
"""File in the run folder with the trainer's workers, one per line."""


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
        return None if self.link_keys is None else load_trainer_keys(self.link_keys)


def engine_child(engine: EngineConfig, address: ServerAddress, folder: Path) -> Child:
    keys = ["--link-keys", str(address.link_keys)] if address.link_keys else []
    options = ["--checkpoint", engine.model, "--link", address.link_address, *keys]
    options += ["--device", engine.device, "--dtype", engine.dtype]

    def argv(_: int) -> list[str]:
        return own_command("engine", *options)

    return Child("engine", argv, folder / "logs" / "engine.log")


async def former_server_gone(folder: Path) -> None:
    """Wait for a dead trainer's server to end. Raises LinkError after `FORMER_SERVER_S`."""
    deadline = time.monotonic() + FORMER_SERVER_S
    while (lock := try_lock(folder / "server.lock")) is None:
        if time.monotonic() > deadline:
            raise LinkError(f"another interchange server still serves {folder}")
        await asyncio.sleep(CHILD_POLL_S)
    lock.close()


async def server_address(
    folder: Path, server: Child, supervisor: Supervisor, *, patience_s: float = 0.0
) -> ServerAddress:
    """Wait up to `SERVER_START_S + patience_s` seconds for `server` to listen. Raises LinkError, or the
    supervisor's error."""
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
    if not path.exists() or server.process is None:
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    assert isinstance(server.process, LocalProcess)
    return data if data["pid"] == server.process.pid else None


def worker_command(config: RunConfig, url: str) -> str:
    """Return the command for another machine, in a folder with the script or the task's file."""
    interchange = config.interchange_server
    remote = interchange.public_base_url or remote_url(url, interchange.interchange_server_host)
    what = shlex.join(worker_arguments(config, elsewhere=True)) or "SCRIPT"
    text = f"tinkerscript worker {what} --server {remote}"
    return f"{text}\n  (with {CLIENT_TOKEN} in its environment)" if reached_through(interchange) else text


def remember_worker(folder: Path, name: str) -> None:
    with (folder / LOCAL_WORKERS).open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")


def release_former_workers(folder: Path, link: TrainerLink) -> None:
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

    On one machine the engine starts them.
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


async def start_workers(
    planned: Sequence[PlannedProcess],
    folder: Path,
    *,
    link: TrainerLink,
    server_url: str,
    supervisor: Supervisor,
) -> None:
    secrets, remembered = worker_secrets(os.environ), set[str]()
    for number, process in enumerate(planned):
        name = f"{link.own_clients}{number}"

        def values(incarnation: int, name: str = name) -> dict[str, str]:
            client = f"{name}-{incarnation}"
            if client not in remembered:
                remembered.add(client)
                remember_worker(folder, client)
            return {Slot.SERVER: server_url, Slot.CLIENT: client}

        def on_death(incarnation: int, code: int, name: str = name, number: int = number) -> None:
            link.release_client(f"{name}-{incarnation}", f"worker {number} died with code {code}")

        child = process.child(folder, values, secrets)
        child.on_death = on_death
        await supervisor.start(child)


def worker_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    token = read_token(environ, CLIENT_TOKEN)
    return {**environ, **({CLIENT_TOKEN: token} if token else {})}
