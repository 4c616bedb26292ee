"""The child processes of a run: the interchange server, the engine of a served model, the local workers.

Owns how each is started, and what a trainer waits for or releases when one has died.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkerscript.config import RunConfig
from tinkerscript.errors import LinkError
from tinkerscript.lifecycle import own_command, try_lock
from tinkerscript.processes.supervisor import Child, Supervisor
from tinkerscript.server.addresses import remote_url
from tinkerscript.server.auth import CLIENT_TOKEN, reached_through
from tinkerscript.trainer_link.keys import TrainerKeys, load_trainer_keys
from tinkerscript.trainer_link.trainer_end import TrainerLink

SERVER_START_S = 60.0
"""Seconds that the server may take to listen."""

FORMER_SERVER_S = 20.0
"""Seconds that the server of a dead trainer may take to end."""

POLL_S = 0.02

LOCAL_WORKERS = "local_workers"
"""File in the run folder with the names of the local workers that were started, one per line."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a running server listens, from its `server.json`."""

    url: str
    link_address: str
    link_keys: Path | None
    """Folder of the link's keys; None for a link that needs none."""

    def trainer_keys(self) -> TrainerKeys | None:
        """The keys that a trainer connects with; None if it needs none. Raises ConfigError."""
        return None if self.link_keys is None else load_trainer_keys(self.link_keys)


def server_child(folder: Path, *, serve_model: bool = False) -> Child:
    """The interchange server of a run folder."""
    options = ["--run-dir", str(folder), *(["--serve-model"] if serve_model else [])]

    def argv(_: int) -> list[str]:
        return own_command("server", *options)

    return Child("interchange server", argv, folder / "logs" / "server.log")


def engine_child(checkpoint: Path, address: ServerAddress, folder: Path) -> Child:
    """The engine that samples from a checkpoint for a server over its link."""
    keys = ["--link-keys", str(address.link_keys)] if address.link_keys else []
    options = ["--checkpoint", str(checkpoint), "--link", address.link_address, *keys]

    def argv(_: int) -> list[str]:
        return own_command("engine", *options)

    return Child("engine", argv, folder / "logs" / "engine.log")


async def former_server_gone(folder: Path) -> None:
    """Wait for the server of a trainer that has just died to end. Raises LinkError if it does not."""
    deadline = time.monotonic() + FORMER_SERVER_S
    while (lock := try_lock(folder / "server.lock")) is None:
        if time.monotonic() > deadline:
            raise LinkError(f"another interchange server serves {folder}")
        await asyncio.sleep(POLL_S)
    lock.close()


async def server_address(
    folder: Path, server: Child, supervisor: Supervisor, *, patience_s: float = 0.0
) -> ServerAddress:
    """Wait until `server` listens, at most `SERVER_START_S + patience_s` seconds.

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
            await asyncio.wait({watch}, timeout=POLL_S)
            if watch.done():
                await watch
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    keys = data.get("link_keys")
    return ServerAddress(data["url"], data["link_address"], Path(keys) if keys else None)


def _written_by(server: Child, path: Path) -> dict[str, Any] | None:
    """The server's addresses; None while the file is missing, or from an earlier process."""
    if not path.exists() or server.process is None:
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    return data if data["pid"] == server.process.pid else None


def worker_command(config: RunConfig, url: str) -> str:
    """What a user types to run a worker of this run on any machine that reaches the server at `url`."""
    interchange = config.interchange_server
    remote = interchange.public_base_url or remote_url(url, interchange.interchange_server_host)
    tasks = " ".join(f"--task {task.name}" for task in config.all_tasks)
    text = f"tinkerscript worker {config.workers.script or tasks or 'SCRIPT'} --server {remote}"
    return f"{text}   (with {CLIENT_TOKEN} in its environment)" if reached_through(interchange) else text


def release_former_workers(folder: Path, link: TrainerLink) -> None:
    """Release the claims of a dead trainer's local workers, which died with it, before the leases expire."""
    path = folder / LOCAL_WORKERS
    if path.exists():
        for name in path.read_text(encoding="utf-8").split():
            link.release_client(name, "the trainer that started this worker is gone")
        path.unlink()


def worker_child(config: RunConfig, folder: Path, url: str, number: int, link: TrainerLink) -> Child:
    """One local worker. Its death releases its claims at once, before their leases expire."""

    def client_uuid(incarnation: int) -> str:
        return f"{link.own_clients}{number}-{incarnation}"

    def argv(incarnation: int) -> list[str]:
        with (folder / LOCAL_WORKERS).open("a", encoding="utf-8") as file:
            file.write(f"{client_uuid(incarnation)}\n")
        work = [config.workers.script] if config.workers.script else []
        for task in [] if config.workers.script else config.all_tasks:
            work += ["--task", task.name, "--task-args", json.dumps(task.train_args)]
        return own_command(
            *("worker", *work, "--server", url),
            *("--concurrency", str(config.workers.concurrency)),
            *("--allow-discard-timeout", str(config.workers.allow_discard_timeout)),
            *("--client-uuid", client_uuid(incarnation)),
        )

    def on_death(incarnation: int, code: int) -> None:
        link.release_client(client_uuid(incarnation), f"worker {number} died with code {code}")

    return Child(f"worker {number}", argv, folder / "logs" / f"worker-{number}.log", on_death=on_death)
