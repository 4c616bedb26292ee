"""`tinkerscript eval`: evaluate a model on an Inspect task through our OpenAI-compatible endpoint.

Owns the endpoint for as long as the eval runs. Inspect's own `eval_async` runs the samples and writes its
usual log.
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
from tinkerscript.train.samples import usable_task
from tinkerscript.workers.inspect_task import InspectTask

MODELS_TIMEOUT_S = 30.0
"""Seconds that the endpoint may take to list its models."""

SERVICE = "tinkerscript"
"""Inspect's name for the endpoint: the model is `openai-api/tinkerscript/<model>` in logs."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What to evaluate, and how. Give either `checkpoint` or `server`."""

    task: str
    """`file.py@name` or a registered name."""

    checkpoint: Path | None = None
    """Folder of a trained model; it is served while the eval runs."""

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
    """Replaces the task's own sandbox."""

    log_dir: Path = Path("logs")


async def evaluate_command(options: EvalOptions, console: Console) -> int:
    """Run the eval and print its scores; returns 0, or 1 if the eval or one of its samples failed.

    Raises ConfigError for a task or checkpoint that cannot be used, ServerUnreachableError.
    """
    log = await evaluate(options, console)
    _print(log, console)
    results = log.results
    whole = results is not None and results.completed_samples == results.total_samples
    return 0 if log.status == "success" and whole else 1


async def evaluate(options: EvalOptions, console: Console) -> EvalLog:
    """Run the eval; returns its log, which is on disk too. Raises as `evaluate_command` does."""
    info, roles = _task(options), _roles(options.model_roles)
    os.environ.setdefault("INSPECT_DISPLAY", "rich" if console.is_terminal else "none")
    display_type()  # Makes Inspect read it now; eval_async would use plain lines.
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


def _task(options: EvalOptions) -> InspectTaskInfo:
    """The task. Raises ConfigError for one that cannot be loaded, or whose sandbox is not available."""
    task = usable_task(options.task, options.task_args)
    assert isinstance(task, InspectTask), "kind_of said so"
    info = task.info
    sandbox = options.sandbox or info.sandbox_type
    if sandbox is not None:
        try:
            check_provider(sandbox)
        except BridgeError as error:
            raise ConfigError(f"{options.task}: {error}") from error
    return info


def _roles(names: Mapping[str, Any]) -> dict[str, str | Model | list[str | Model]]:
    """The model of each role. Raises ConfigError for a model that Inspect cannot use."""
    models: dict[str, str | Model | list[str | Model]] = {}
    for role, name in names.items():
        if not isinstance(name, str):
            raise ConfigError(f"--model-roles: the model of {role!r} must be a name, got {json.dumps(name)}")
        try:
            models[role] = get_model(name)
        except Exception as error:  # Any kind: unknown provider, missing package, missing key.
            raise ConfigError(f"--model-roles: {role!r}: {name!r} cannot be used: {_plain(error)}") from error
    return models


def _plain(error: Exception) -> str:
    """The error in one line. Inspect's PrerequisiteError keeps its text, with rich's tags, in `message`."""
    text = re.sub(r"\[/?bold\]", "", str(getattr(error, "message", error)))
    return " ".join(text.split())


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
async def _endpoint(options: EvalOptions, console: Console) -> AsyncGenerator[ModelEndpoint]:
    """The server that runs already, or a new one for the checkpoint. Raises ConfigError."""
    if (options.checkpoint is None) == (not options.server):
        raise ConfigError("give one of --checkpoint FOLDER and --server URL")
    if options.checkpoint is None:
        yield ModelEndpoint(f"{options.server.rstrip('/').removesuffix('/v1')}/v1")
        return
    async with served_checkpoint(options.checkpoint, "127.0.0.1", 0, console.print) as served:
        yield ModelEndpoint(f"{served.address.url}/v1", served.supervisor)


async def _model(url: str, options: EvalOptions) -> Model:
    """The endpoint's first model. Raises ServerUnreachableError, or ConfigError if the endpoint refuses."""
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
