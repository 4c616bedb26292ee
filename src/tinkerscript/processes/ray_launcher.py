"""`RayLauncher` starts a run's processes where a Ray cluster has room.

Ray runs in a child process (`processes.ray_agent`), because it ends connected processes when the cluster's
head is gone, and the trainer must still save its weights. Secrets never pass through a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tinkerscript.access_tokens import is_loopback
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.lifecycle import describe_exit, last_lines
from tinkerscript.processes.launcher import Child, Launcher, LocalLauncher, Slot, Started
from tinkerscript.processes.planned import PlannedProcess

ACTOR_STOP_S = 4.0

ROOM_S = 600.0  # For everything that must run from the start.

LINE_BYTES = 2**20


@asynccontextmanager
async def open_launcher(
    config: RunConfig,
    plan: Sequence[PlannedProcess],
    folder: Path,
    note: Callable[[str], None],
    room_s: float = ROOM_S,
) -> AsyncGenerator[Launcher]:
    if config.cluster.launcher == "local":
        yield LocalLauncher()
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("cluster.launcher: ray is not installed; run pip install 'tinkerscript[ray]'")
    log = folder / "logs" / "ray.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinkerscript.processes.ray_agent"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=output,
            start_new_session=True,
            limit=LINE_BYTES,
        )
    launcher = RayLauncher(process, log, note)
    try:
        await launcher.connect(config, plan, room_s)
        if launcher.gpus:  # CUDA reads it at its first use.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(launcher.gpus)
        yield launcher
    finally:
        await asyncio.shield(launcher.close())


class RayProcess(Started):
    def __init__(self, number: int, send: Callable[[dict[str, Any]], None]) -> None:
        self.host, self.port = "", 0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.why = ""  # Set if it did not end by itself, as on a lost machine.
        self._number = number
        self._send = send

    @property
    def returncode(self) -> int | None:
        if not self.ended.done() or self.ended.exception():
            return None
        return self.ended.result()

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def ask_to_stop(self) -> None:
        self._send({"stop": self._number})

    def kill(self) -> None:
        self._send({"kill": self._number})

    def describe_end(self) -> str:
        return self.why or super().describe_end()


class RayLauncher(Launcher):
    shares_files = False

    def __init__(self, process: Process, log: Path, note: Callable[[str], None]) -> None:
        self.gpus: list[str] = []
        self._process = process
        self._log = log
        self._note = note
        self._started: dict[int, tuple[RayProcess, Callable[[Started], None]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._where = ""
        self._failure: WorkerError | None = None
        self._reading = asyncio.create_task(self._read(), name="ray agent")

    async def connect(self, config: RunConfig, plan: Sequence[PlannedProcess], room_s: float) -> None:
        """Join the cluster, and wait for room for everything but the workers."""
        self._where = f" at {config.cluster.address}" if config.cluster.address else ""
        fixed = [
            process
            for process in plan
            if process.on_trainer_machine or not process.name.startswith("worker ")
        ]
        self._send(
            {
                "address": config.cluster.address,
                "timeout_s": room_s,
                "cpus": sum(process.resources.cpus for process in plan),
                "processes": [
                    {
                        "name": process.name,
                        "cpus": process.resources.cpus,
                        "gpus": process.resources.gpus,
                        "beside": process.on_trainer_machine,
                    }
                    for process in fixed
                ],
            }
        )
        try:
            ready = await asyncio.shield(self._ready)
        except WorkerError as error:
            raise ConfigError(f"cluster.launcher: ray: {error}") from None
        self.address, self.gpus = ready["address"], ready["gpus"]
        others = sorted(set(ready["nodes"]) - {self.address})
        section = config.interchange_server
        if others and is_loopback(section.interchange_server_host) and not section.public_base_url:
            raise ConfigError(
                f"cluster.address: {config.cluster.address!r} has other machines ({', '.join(others[:5])}), "
                f"which cannot reach an interchange server on {section.interchange_server_host}; set "
                "interchange_server.interchange_server_host: 0.0.0.0, and the two tokens that it requires"
            )

    async def start(self, child: Child) -> RayProcess:
        if self._failure is not None:
            raise self._failure
        number = len(self._started)
        process = RayProcess(number, self._send)
        self._started[number] = process, child.on_start
        argv = child.argv(child.restarts)
        self._send(
            {
                "start": number,
                "name": child.name,
                "argv": [{"slot": word.name} if isinstance(word, Slot) else word for word in argv],
                "python": sys.executable,
                "cwd": str(Path.cwd()),
                "environ": dict(child.environ),
                "withheld": list(child.withheld),
                "cpus": child.resources.cpus,
                "gpus": child.resources.gpus,
                "log": str(child.log),
            }
        )
        return process

    async def close(self) -> None:
        """Also ends a private cluster."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), ACTOR_STOP_S)
        except TimeoutError:
            self._note("Ray did not end in time and was killed")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading
        if self._ready.done():
            self._ready.exception()  # It was raised already, or is too late.

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        failure = ""
        async for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            failure = message.get("failed", failure)
            self._on_message(message)
        end = describe_exit(await self._process.wait())
        what = "the Ray cluster is lost" if self._ready.done() else f"cannot connect to Ray{self._where}"
        tail = f"its agent ended ({end}); the end of {self._log}:\n{last_lines(self._log)}"
        self._fail(WorkerError(failure or f"{what}: {tail}"))

    def _on_message(self, message: dict[str, Any]) -> None:
        match message:
            case {"ready": facts}:
                self._ready.set_result(facts)
            case {"started": number, "host": host, "port": port}:
                process, on_start = self._started[number]
                process.host, process.port = host, port
                on_start(process)
            case {"ended": number, "code": code, "why": why}:
                process, _ = self._started[number]
                process.why = why
                if not process.ended.done():
                    process.ended.set_result(code)
            case {"note": text}:
                self._note(text)
            case _:
                pass

    def _fail(self, error: WorkerError) -> None:
        self._failure = error
        for future in (self._ready, *(process.ended for process, _ in self._started.values())):
            if not future.done():
                future.set_exception(error)
                future.exception()  # Keeps asyncio from logging it.
