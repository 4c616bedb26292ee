"""`tinkerscript eval` evaluates a model on a task through our OpenAI-compatible endpoint.

Inspect runs its own tasks and writes its usual log; `evaluate_task` runs other tasks as a worker does. A
rollout that raises never counts in a score.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from inspect_ai import eval_async
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.util import display_type
from rich.console import Console
from rich.table import Table

from inspect_tinker_bridge import BridgeError, InspectTaskInfo
from inspect_tinker_bridge.episodes import TuningLeftOut
from inspect_tinker_bridge.sandbox import check_provider
from tinkerscript.client.episode import as_output
from tinkerscript.commands.serve import served_checkpoint
from tinkerscript.config import Dtype, EngineConfig
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.processes.supervisor import Supervisor, run_beside
from tinkerscript.protocol import checked_reward, failure_line
from tinkerscript.train.samples import usable_task
from tinkerscript.workers.base_task import INSPECT, EpisodeModel, Task, TaskSample, kind_of
from tinkerscript.workers.chat_endpoint import ChatEndpoint
from tinkerscript.workers.inspect_task import InspectTask

SERVICE = "tinkerscript"
"""Inspect's logs call the model `openai-api/tinkerscript/<model>`."""


async def evaluate_command(options: EvalOptions, console: Console) -> int:
    """Returns 1 if anything failed, otherwise 0. May raise ServerUnreachableError."""
    if kind_of(options.task) != INSPECT:
        return await evaluate_task(options, console)
    log = await evaluate(options, console)
    _print(log, console)
    results = log.results
    whole = results is not None and results.completed_samples == results.total_samples
    return 0 if log.status == "success" and whole else 1


async def evaluate(options: EvalOptions, console: Console) -> EvalLog:
    info, roles = _task(options), _roles(options.model_roles)
    os.environ.setdefault("INSPECT_DISPLAY", "rich" if console.is_terminal else "none")
    display_type()  # Inspect must read the variable now; eval_async would use plain lines.
    async with model_endpoint(options, console) as endpoint:
        running = eval_async(
            info.fresh_task(),
            model=await _model(endpoint.url, options),
            model_roles=roles or None,
            sandbox=_sandbox(options.sandbox),
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
    task = usable_task(options.task, options.task_args)
    assert isinstance(task, InspectTask), "kind_of said so"
    info = task.info
    sandbox = options.sandbox or info.sandbox_type
    if sandbox is not None:
        try:
            check_provider(sandbox.partition(":")[0])
        except BridgeError as error:
            raise ConfigError(f"{options.task}: {error}") from error
    return info


def _sandbox(named: str | None) -> str | tuple[str, str] | None:
    kind, _, config = (named or "").partition(":")
    return (kind, config) if config else kind or None


def _roles(names: Mapping[str, Any]) -> dict[str, str | Model | list[str | Model]]:
    models: dict[str, str | Model | list[str | Model]] = {}
    for role, name in names.items():
        if not isinstance(name, str):
            raise ConfigError(f"--model-roles: the model of {role!r} must be a name, got {json.dumps(name)}")
        try:
            models[role] = get_model(name)
        except Exception as error:  # Unknown provider, missing package or key, and more.
            raise ConfigError(f"--model-roles: {role!r}: {name!r} cannot be used: {_plain(error)}") from error
    return models


def _plain(error: Exception) -> str:
    # Inspect's PrerequisiteError has rich's tags in `message`.
    text = re.sub(r"\[/?bold\]", "", str(getattr(error, "message", error)))
    return " ".join(text.split())


async def _model(url: str, options: EvalOptions) -> Model:
    name = await model_name(url, options)
    config = GenerateConfig(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        max_connections=options.max_connections,
    )
    made = get_model(
        f"openai-api/{SERVICE}/{name}", config=config, base_url=url, api_key=options.api_key, memoize=False
    )
    return TuningLeftOut(made.api, made.config, made.model_args)


def _print(log: EvalLog, console: Console) -> None:
    table = Table("scorer", "metric", "value")
    for score in log.results.scores if log.results else []:
        for name, metric in score.metrics.items():
            table.add_row(score.name, name, f"{metric.value:.3f}")
    console.print(table)
    # If every sample failed, Inspect has no results.
    failed = [sample for sample in log.samples or [] if sample.error is not None]
    scored = len(log.samples or []) - len(failed)
    if log.error is not None:
        console.print(f"the eval failed: {log.error.message}", highlight=False, markup=False)
    if failed and failed[0].error is not None:
        first = f"the first failure: sample {failed[0].id}: {failed[0].error.message}"
        console.print(first, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{log.eval.task}: {scored} samples scored, {len(failed)} failed\nlog {log.location}",
        highlight=False,
        soft_wrap=True,
    )


MODELS_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Give either `checkpoint` or `server`."""

    task: str

    checkpoint: str | None = None
    device: str = "cpu"
    dtype: Dtype = "float32"
    server: str = ""
    """A running `tinkerscript serve --checkpoint`, or another OpenAI-compatible endpoint."""

    api_key: str = "none"
    task_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model_roles: Mapping[str, str] = field(default_factory=dict[str, str])
    limit: int | None = None
    epochs: int | None = None  # None: the task's setting.
    temperature: float | None = None
    max_tokens: int | None = None
    max_connections: int = 32
    sandbox: str | None = None  # `TYPE` or `TYPE:CONFIG_FILE`.
    log_dir: Path = Path("logs")


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    url: str
    supervisor: Supervisor | None = None

    async def failed(self) -> None:
        if self.supervisor is None:
            await asyncio.Event().wait()
        else:
            await self.supervisor.failed()


@asynccontextmanager
async def model_endpoint(options: EvalOptions, console: Console) -> AsyncGenerator[ModelEndpoint]:
    """Yield the running server's endpoint, or a new server's for the checkpoint."""
    if (options.checkpoint is None) == (not options.server):
        raise ConfigError("give either --checkpoint FOLDER or --server URL")
    if options.checkpoint is None:
        yield ModelEndpoint(f"{options.server.rstrip('/').removesuffix('/v1')}/v1")
        return
    engine = EngineConfig(model=options.checkpoint, device=options.device, dtype=options.dtype)
    async with served_checkpoint(engine, "127.0.0.1", 0, console.print) as served:
        yield ModelEndpoint(f"{served.address.url}/v1", served.supervisor)


async def model_name(url: str, options: EvalOptions) -> str:
    headers = {"Authorization": f"Bearer {options.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=MODELS_TIMEOUT_S) as http:
            response = await http.get(f"{url}/models", headers=headers)
    except httpx.TransportError as error:
        raise ServerUnreachableError(f"no model server answers at {url}: {error!r}") from error
    if response.is_error:
        raise ConfigError(f"{url}/models answered {response.status_code}: {response.text[:200]}")
    return str(response.json()["data"][0]["id"])


async def evaluate_task(options: EvalOptions, console: Console) -> int:
    if options.model_roles or options.sandbox:
        raise ConfigError(
            f"--model-roles and --sandbox need an Inspect task, and {options.task!r} is not one"
        )
    task = usable_task(options.task, options.task_args)
    samples = list(task.samples(held_out=True))[: options.limit]
    if not samples:
        raise ConfigError(f"{options.task!r} with {dict(options.task_args)} has no samples")
    async with model_endpoint(options, console) as endpoint:
        running = _run(task, samples, endpoint.url, options)
        lines = await run_beside(endpoint, asyncio.create_task(running, name="eval"))
    path = _write(lines, task.task_id, options.log_dir)
    _print_scores(lines, task.task_id, path, console)
    return 1 if any("error" in line for line in lines) else 0


async def _run(
    task: Task, samples: Sequence[TaskSample], url: str, options: EvalOptions
) -> list[dict[str, Any]]:
    limits = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    chat = ChatEndpoint()
    model = EpisodeModel(
        base_url=url,
        api_key=options.api_key,
        name=await model_name(url, options),
        endpoint=chat,
        sampling={name: value for name, value in limits.items() if value is not None},
    )
    slots = asyncio.Semaphore(options.max_connections)

    async def attempt(sample: TaskSample, epoch: int) -> dict[str, Any]:
        line: dict[str, Any] = {"id": sample["id"], "epoch": epoch, "input": sample.get("input", "")}
        async with slots:
            try:
                output = as_output(await task.rollout(sample, replace(model, reply_ids=[])))
                reward = checked_reward(output)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a rollout raised is recorded
                return line | {"error": failure_line(error)}
        return line | output.model_dump(mode="json", exclude_none=True) | {"reward": reward}

    try:
        async with type(task).resources([task]):
            attempts = [attempt(sample, epoch) for sample in samples for epoch in range(options.epochs or 1)]
            return await asyncio.gather(*attempts)
    finally:
        await chat.aclose()


def _write(lines: Sequence[Mapping[str, Any]], task_id: str, folder: Path) -> Path:
    plain = "".join(letter if letter.isalnum() else "-" for letter in task_id)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now():%Y-%m-%dT%H-%M-%S-%f}_{plain}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _print_scores(lines: Sequence[Mapping[str, Any]], task_id: str, path: Path, console: Console) -> None:
    values: dict[str, list[float]] = defaultdict(list)
    scored = [line for line in lines if "error" not in line]
    for line in scored:
        values["reward"].append(line["reward"])
        for name, value in line["log_metrics"].items():
            values[name].append(value)
    table = Table("score", "mean", "samples")
    for name, found in values.items():
        table.add_row(name, f"{fmean(found):.3f}", str(len(found)))
    console.print(table)
    failed = [line["error"] for line in lines if "error" in line]
    if failed:
        console.print(f"the first failure: {failed[0]}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{task_id}: {len(scored)} episodes scored, {len(failed)} failed\nlog {path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
