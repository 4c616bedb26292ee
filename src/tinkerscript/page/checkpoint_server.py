"""`CheckpointServer`: a checkpoint of a run that can be chatted with, served by `tinkerscript serve`.

Invariants: there is one at a time, whoever asks. It ends `IDLE_S` seconds after its last use, when another
one is loaded, and with the page, however that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.lifecycle import describe_exit, last_lines, own_command, stop_child
from tinkerscript.server.auth import CLIENT_TOKEN, TOKEN_VARIABLES

IDLE_S = 600.0
START_S = 600.0
"""Seconds that a model may take to load."""

STOP_GRACE_S = 6.0
"""Seconds between the request to stop and SIGKILL. The server and the engine behind it end first."""

POLL_S = 0.1
TIMEOUT_S = 5.0
CHAT_TIMEOUT_S = 180.0

_ADDRESS = re.compile(r" at (http://\S+)/v1 ")
"""In the line that `tinkerscript serve` prints once it listens."""


class SavedWeights(BaseModel):
    """Weights that a run wrote."""

    name: str
    step: int | None = Field(description="The training step after which they were written; null: the last.")
    time: float = Field(description="Unix time in seconds at which they were written.")
    size_bytes: int = Field(description="Of the weights, without the optimizer's state.")
    is_adapter: bool = Field(description="Whether it is a LoRA adapter, which needs its base model.")


class LoadedCheckpoint(BaseModel):
    """The checkpoint that can be chatted with."""

    state: Literal["none", "loading", "ready", "failed"]
    run: str = ""
    name: str = ""
    since: float = Field(default=0.0, description="Unix time in seconds at which this state began.")
    ends_in_s: float | None = Field(default=None, description="Until it ends if nobody uses it.")
    failure: str = Field(default="", description="Why it is not there: the end of what it printed.")


def checkpoints(folder: Path) -> list[SavedWeights]:
    """The checkpoints of the run in `folder`, newest first."""
    paths = [path for path in (folder / "checkpoints").glob("*") if _is_model(path)]
    return sorted((_checkpoint(path) for path in paths), key=lambda each: (-each.time, each.name))


def _is_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def _checkpoint(path: Path) -> SavedWeights:
    step = re.fullmatch(r"step_(\d+)", path.name)
    return SavedWeights(
        name=path.name,
        step=int(step[1]) if step else None,
        time=path.stat().st_mtime,
        size_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        is_adapter=(path / "adapter_config.json").is_file(),
    )


class CheckpointServer:
    """The one that is loaded, if there is one. For one event loop."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._changing = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._loaded = LoadedCheckpoint(state="none")
        self._client: httpx.AsyncClient | None = None
        self._used = 0.0
        self._in_flight = 0

    @property
    def loaded(self) -> LoadedCheckpoint:
        left = None
        if self._loaded.state == "ready" and not self._in_flight:
            left = max(0.0, self._used + self._idle_s - time.monotonic())
        return self._loaded.model_copy(update={"ends_in_s": left})

    async def load(self, run: str, folder: Path, name: str) -> LoadedCheckpoint:
        """Begin to load a checkpoint in place of the one before. Raises NotRecordedError if there is none."""
        found = await asyncio.to_thread(checkpoints, folder)
        if name not in {each.name for each in found}:
            known = ", ".join(each.name for each in found) or "none"
            raise NotRecordedError(f"the run has no checkpoint {name!r}; it has {known}")
        async with self._changing:
            loaded = self._loaded
            if (loaded.run, loaded.name) == (run, name) and loaded.state in ("loading", "ready"):
                return self.loaded
            await self._end()
            self._becomes("loading", run=run, name=name)
            work = self._serve(folder / "checkpoints" / name)
            self._serving = asyncio.create_task(work, name=f"serve {name} of {run}")
        return self.loaded

    async def end(self) -> None:
        """End what is loaded."""
        async with self._changing:
            await self._end()
            self._loaded = LoadedCheckpoint(state="none")

    async def chat(self, run: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A reply of the loaded checkpoint. Raises NotRecordedError if it is not this one, or says no."""
        loaded = self._loaded
        if self._client is None or (loaded.run, loaded.name, loaded.state) != (run, name, "ready"):
            raise NotRecordedError(f"checkpoint {name!r} of {run} is not loaded: load it first")
        self._in_flight += 1
        try:
            reply = await self._client.post("/v1/chat/completions", json=body, timeout=CHAT_TIMEOUT_S)
            data: dict[str, Any] = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise NotRecordedError(f"checkpoint {name!r} did not answer: {reason}") from error
        finally:
            self._in_flight -= 1
            self._used = time.monotonic()
        if reply.status_code >= 400:
            raise NotRecordedError(
                f"checkpoint {name!r} refuses: {data.get('error', {}).get('message', data)}"
            )
        return data

    def _becomes(self, state: str, **changes: object) -> None:
        update = {"state": state, "since": time.time(), "failure": "", **changes}
        self._loaded = self._loaded.model_copy(update=update)

    async def _end(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, path: Path) -> None:
        """Start it, wait until it is idle, end it."""
        with tempfile.NamedTemporaryFile(prefix="tinkerscript-try-", suffix=".log") as log:
            token = secrets.token_hex()
            process = await _started(path, token, log)
            try:
                url = await _address(process, Path(log.name))
                headers = {"authorization": f"Bearer {token}"}
                async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
                    await _samples(process, client, Path(log.name))
                    self._client, self._used = client, time.monotonic()
                    self._becomes("ready")
                    await self._idle(process, Path(log.name))
                    self._becomes("none", run="", name="")
            except (NotRecordedError, OSError) as error:
                self._becomes("failed", failure=str(error))
            finally:
                self._client = None
                await asyncio.shield(stop_child(process, STOP_GRACE_S))

    async def _idle(self, process: Process, log: Path) -> None:
        """Return once nobody has used it for a while. Raises NotRecordedError if it ends by itself."""
        while (left := self._used + self._idle_s - time.monotonic()) > 0 or self._in_flight:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), max(POLL_S, left))
                raise _ended(process, log)


async def _started(path: Path, token: str, log: Any) -> Process:
    command = own_command("serve", "--checkpoint", str(path), "--port", "0", "--max-restarts", "0")
    environ = {name: value for name, value in os.environ.items() if name not in TOKEN_VARIABLES}
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=environ | {CLIENT_TOKEN: token, "COLUMNS": "500"},
    )


async def _address(process: Process, log: Path) -> str:
    """Where it listens."""
    async for _ in _polls(process, log):
        if found := _ADDRESS.search(_printed(log)):
            return found[1]
    raise AssertionError("unreachable")


def _printed(log: Path) -> str:
    return log.read_text(errors="replace")


async def _samples(process: Process, client: httpx.AsyncClient, log: Path) -> None:
    """Return once the model behind the server samples."""
    async for _ in _polls(process, log):
        with contextlib.suppress(httpx.TransportError):
            reply = await client.get("/get_engine_status", timeout=TIMEOUT_S)
            if reply.json()["engine_status"] == "ENGINE.ROLLING":
                return


async def _polls(process: Process, log: Path) -> AsyncGenerator[None]:
    """Once in `POLL_S` seconds. Raises NotRecordedError when the process ends or takes too long."""
    deadline = time.monotonic() + START_S
    while True:
        yield
        if process.returncode is not None:
            raise _ended(process, log)
        if time.monotonic() > deadline:
            raise NotRecordedError(f"the model did not load within {START_S:.0f} s:\n{last_lines(log)}")
        await asyncio.sleep(POLL_S)


def _ended(process: Process, log: Path) -> NotRecordedError:
    assert process.returncode is not None
    return NotRecordedError(f"the model ended ({describe_exit(process.returncode)}):\n{last_lines(log)}")
