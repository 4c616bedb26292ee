"""`tinkerscript eval`: a task on a trained model through plain Inspect, against our own OpenAI endpoint.

Owns nothing of how an episode runs: Inspect's own eval does that, and writes its ordinary log.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from inspect_ai import eval_async
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.util import display_type
from rich.console import Console
from rich.table import Table

from inspect_tinker_bridge import BridgeError, InspectTaskInfo
from inspect_tinker_bridge.sandbox import check_provider
from tinkerscript.commands.serve import served_checkpoint
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.processes.supervisor import Supervisor, run_beside
from tinkerscript.train.samples import load_task

MODELS_TIMEOUT_S = 30.0


SERVICE = "tinkerscript"
"""Inspect's name for the endpoint: the model is `openai-api/tinkerscript/<model>` in logs."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What is evaluated, and how. Exactly one of `checkpoint` and `server` is given."""

    task: str
    """`file.py@name` or a registered name."""

    checkpoint: Path | None = None
    """Folder of a trained model; a server for it runs as long as the eval does."""

    server: str = ""
    """URL of a running `tinkerscript serve --checkpoint`, or of another OpenAI-compatible endpoint."""

    api_key: str = "none"
    task_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model_roles: Mapping[str, str] = field(default_factory=dict[str, str])
    """Inspect's name of the model for each role, such as a grader."""

    limit: int | None = None
    """Samples at most; None: all."""

    epochs: int | None = None
    """Attempts at each sample; None: as the task says."""

    temperature: float | None = None
    max_tokens: int | None = None
    max_connections: int = 32
    sandbox: str | None = None
    """In place of the task's own sandbox."""

    log_dir: Path = Path("logs")


async def evaluate_command(options: EvalOptions, console: Console) -> int:
    """Run the eval and print its scores; 0, or 1 where the eval or one of its samples failed.

    Raises ConfigError for a task or checkpoint that cannot be used, ServerUnreachableError.
    """
    log = await evaluate(options, console)
    _print(log, console)
    results = log.results
    whole = results is not None and results.completed_samples == results.total_samples
    return 0 if log.status == "success" and whole else 1


async def evaluate(options: EvalOptions, console: Console) -> EvalLog:
    """The log of the eval, which is on disk too. Raises as `evaluate_command` does."""
    info, roles = await _task(options), _roles(options.model_roles)
    os.environ.setdefault("INSPECT_DISPLAY", "rich" if console.is_terminal else "none")
    display_type()  # Inspect reads it now; eval_async would settle for plain lines.
    async with _endpoint(options, console) as endpoint:
        running = eval_async(
            info.fresh_task(),
            model=await _model(endpoint.url, options),
            model_roles=roles or None,
            sandbox=options.sandbox,
            limit=options.limit,
            epochs=options.epochs,
            log_dir=str(options.log_dir),
            log_format="eval",
            fail_on_error=False,
            score_display=False,
        )
        (log,) = await run_beside(endpoint, asyncio.create_task(running, name="eval"))
    return log


async def _task(options: EvalOptions) -> InspectTaskInfo:
    """The task, with a sandbox that can be had. Raises ConfigError."""
    info = load_task(options.task, options.task_args)
    sandbox = options.sandbox or info.sandbox_type
    if sandbox is not None:
        try:
            await check_provider(sandbox)
        except BridgeError as error:
            raise ConfigError(f"{options.task}: {error}") from error
    return info


def _roles(names: Mapping[str, Any]) -> dict[str, str | Model | list[str | Model]]:
    """The model of each role. Raises ConfigError for one that Inspect does not know or cannot use."""
    models: dict[str, str | Model | list[str | Model]] = {}
    for role, name in names.items():
        if not isinstance(name, str):
            raise ConfigError(f"--model-roles: the model of {role!r} must be a name, got {json.dumps(name)}")
        try:
            models[role] = get_model(name)
        except Exception as error:  # Of many kinds: no such provider, no package for it, no key.
            raise ConfigError(f"--model-roles: {role!r}: {name!r} cannot be used: {_plain(error)}") from error
    return models


def _plain(error: Exception) -> str:
    """In one line; Inspect's PrerequisiteError has its text, with rich's tags, in `message` alone."""
    text = re.sub(r"\[/?bold\]", "", str(getattr(error, "message", error)))
    return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the model is asked."""

    url: str
    """OpenAI's base URL."""

    supervisor: Supervisor | None = None
    """Of the server that runs for this eval; None for one that is there."""

    async def failed(self) -> None:
        """Returns never; raises when the server or its engine cannot run."""
        if self.supervisor is None:
            await asyncio.Event().wait()
        else:
            await self.supervisor.failed()


@asynccontextmanager
async def _endpoint(options: EvalOptions, console: Console) -> AsyncGenerator[Endpoint]:
    """The server that is there, or one for the checkpoint. Raises ConfigError."""
    if (options.checkpoint is None) == (not options.server):
        raise ConfigError("give one of --checkpoint FOLDER and --server URL")
    if options.checkpoint is None:
        yield Endpoint(f"{options.server.rstrip('/').removesuffix('/v1')}/v1")
        return
    async with served_checkpoint(options.checkpoint, "127.0.0.1", 0, console.print) as served:
        yield Endpoint(f"{served.address.url}/v1", served.supervisor)


async def _model(url: str, options: EvalOptions) -> Model:
    """The first model of the endpoint. Raises ServerUnreachableError, and ConfigError where it refuses."""
    headers = {"Authorization": f"Bearer {options.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=MODELS_TIMEOUT_S) as http:
            response = await http.get(f"{url}/models", headers=headers)
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"no model server answers at {url}: {error!r}") from error
    if response.is_error:
        raise ConfigError(f"{url}/models answered {response.status_code}: {response.text[:200]}")
    name = response.json()["data"][0]["id"]
    config = GenerateConfig(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        max_connections=options.max_connections,
    )
    return get_model(
        f"openai-api/{SERVICE}/{name}", config=config, base_url=url, api_key=options.api_key, memoize=False
    )


def _print(log: EvalLog, console: Console) -> None:
    table = Table("scorer", "metric", "value")
    for score in log.results.scores if log.results else []:
        for name, metric in score.metrics.items():
            table.add_row(score.name, name, f"{metric.value:.3f}")
    console.print(table)
    results = log.results
    failed = results.total_samples - results.completed_samples if results else 0
    if log.error is not None:
        console.print(f"the eval failed: {log.error.message}", highlight=False, markup=False)
    console.print(
        f"{log.eval.task}: {results.completed_samples if results else 0} samples scored, {failed} failed\n"
        f"log {log.location}",
        highlight=False,
        soft_wrap=True,
    )
