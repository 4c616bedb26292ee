"""`tinkerscript eval`: evaluate a model on a task through our OpenAI-compatible endpoint.

Inspect's own `eval_async` runs the samples of its tasks and writes its usual log; `evaluate_task` runs those
of other kinds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from inspect_ai import eval_async
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.util import display_type
from rich.console import Console
from rich.table import Table

from inspect_tinker_bridge import BridgeError, InspectTaskInfo
from inspect_tinker_bridge.episodes import TuningLeftOut
from inspect_tinker_bridge.sandbox import check_provider
from tinkerscript.commands.evaluate_task import evaluate_task
from tinkerscript.commands.evaluated_model import EvalOptions, model_endpoint, model_name
from tinkerscript.errors import ConfigError
from tinkerscript.processes.supervisor import run_beside
from tinkerscript.train.samples import usable_task
from tinkerscript.workers.base_task import INSPECT, kind_of
from tinkerscript.workers.inspect_task import InspectTask

SERVICE = "tinkerscript"
"""Inspect's name for the endpoint: the model is `openai-api/tinkerscript/<model>` in logs."""


async def evaluate_command(options: EvalOptions, console: Console) -> int:
    """Run the eval and print its scores; returns 0, or 1 if the eval or one of its samples failed.

    Raises ConfigError for a task or checkpoint that cannot be used, ServerUnreachableError.
    """
    if kind_of(options.task) != INSPECT:
        return await evaluate_task(options, console)
    log = await evaluate(options, console)
    _print(log, console)
    results = log.results
    whole = results is not None and results.completed_samples == results.total_samples
    return 0 if log.status == "success" and whole else 1


async def evaluate(options: EvalOptions, console: Console) -> EvalLog:
    """Run the eval of an Inspect task; returns its log, which is on disk too. Raises as `evaluate_command`
    does."""
    info, roles = _task(options), _roles(options.model_roles)
    os.environ.setdefault("INSPECT_DISPLAY", "rich" if console.is_terminal else "none")
    display_type()  # Makes Inspect read it now; eval_async would use plain lines.
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
    """The task. Raises ConfigError for one that cannot be loaded, or whose sandbox is not available."""
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
    """Type, or type and config file, as Inspect takes it."""
    kind, _, config = (named or "").partition(":")
    return (kind, config) if config else kind or None


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


async def _model(url: str, options: EvalOptions) -> Model:
    """The endpoint's first model. Raises what `model_name` raises."""
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
    # Inspect has no results where every sample failed, and counts no failure in them where some did.
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
