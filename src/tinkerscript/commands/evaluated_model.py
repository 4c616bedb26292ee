"""What `tinkerscript eval` evaluates: its options, and the endpoint of the model while it is evaluated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from tinkerscript.commands.serve import served_checkpoint
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.processes.supervisor import Supervisor

MODELS_TIMEOUT_S = 30.0
"""Seconds that the endpoint may take to list its models."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What to evaluate, and how. Give either `checkpoint` or `server`."""

    task: str
    """`file.py@name`, a registered name, or a task of another kind."""

    checkpoint: str | None = None
    """Folder or URL of a trained model; it is served while the eval runs."""

    server: str = ""
    """URL of a running `tinkerscript serve --checkpoint`, or of another OpenAI-compatible endpoint."""

    api_key: str = "none"
    task_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model_roles: Mapping[str, str] = field(default_factory=dict[str, str])
    """Inspect's name of the model for each role, such as a grader."""

    limit: int | None = None
    """Maximum number of samples. None: all."""

    epochs: int | None = None
    """Attempts at each sample. None: the task's own setting."""

    temperature: float | None = None
    max_tokens: int | None = None
    max_connections: int = 32
    sandbox: str | None = None
    """Replaces the task's own sandbox: `TYPE`, or `TYPE:CONFIG_FILE`."""

    log_dir: Path = Path("logs")


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where to reach the model."""

    url: str
    """Base URL for OpenAI clients."""

    supervisor: Supervisor | None = None
    """Supervisor of the server that this eval started; None for a server that runs already."""

    async def failed(self) -> None:
        """Never returns; raises when the server or its engine cannot run."""
        if self.supervisor is None:
            await asyncio.Event().wait()
        else:
            await self.supervisor.failed()


@asynccontextmanager
async def model_endpoint(options: EvalOptions, console: Console) -> AsyncGenerator[ModelEndpoint]:
    """The server that runs already, or a new one for the checkpoint. Raises ConfigError."""
    if (options.checkpoint is None) == (not options.server):
        raise ConfigError("give one of --checkpoint FOLDER and --server URL")
    if options.checkpoint is None:
        yield ModelEndpoint(f"{options.server.rstrip('/').removesuffix('/v1')}/v1")
        return
    async with served_checkpoint(options.checkpoint, "127.0.0.1", 0, console.print) as served:
        yield ModelEndpoint(f"{served.address.url}/v1", served.supervisor)


async def model_name(url: str, options: EvalOptions) -> str:
    """The endpoint's first model. Raises ServerUnreachableError, or ConfigError if the endpoint refuses."""
    headers = {"Authorization": f"Bearer {options.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=MODELS_TIMEOUT_S) as http:
            response = await http.get(f"{url}/models", headers=headers)
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"no model server answers at {url}: {error!r}") from error
    if response.is_error:
        raise ConfigError(f"{url}/models answered {response.status_code}: {response.text[:200]}")
    return str(response.json()["data"][0]["id"])
