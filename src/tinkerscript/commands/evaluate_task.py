"""`tinkerscript eval` on a task of another kind than Inspect's: its held-out samples, run as a worker runs
them.

Invariant: a rollout that raises is a failed sample, with its reason in the log; it is not averaged into a
score.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tinkerscript.client.episode import as_output
from tinkerscript.client.operations import failure_line
from tinkerscript.commands.evaluated_model import EvalOptions, model_endpoint, model_name
from tinkerscript.errors import ConfigError
from tinkerscript.processes.supervisor import run_beside
from tinkerscript.train.samples import usable_task
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample
from tinkerscript.workers.chat_endpoint import ChatEndpoint


async def evaluate_task(options: EvalOptions, console: Console) -> int:
    """Run the samples, print the scores and write them; returns 0, or 1 if a sample failed.

    Raises ConfigError for a task or checkpoint that cannot be used, or an option of Inspect alone,
    ServerUnreachableError.
    """
    if options.model_roles or options.sandbox:
        raise ConfigError(f"--model-roles and --sandbox are for Inspect tasks; {options.task!r} is none")
    task = usable_task(options.task, options.task_args)
    samples = list(task.samples(held_out=True))[: options.limit]
    if not samples:
        raise ConfigError(f"{options.task!r} with {dict(options.task_args)} has no samples")
    async with model_endpoint(options, console) as endpoint:
        running = _run(task, samples, endpoint.url, options)
        lines = await run_beside(endpoint, asyncio.create_task(running, name="eval"))
    path = _write(lines, task.task_id, options.log_dir)
    _print(lines, task.task_id, path, console)
    return 1 if any("error" in line for line in lines) else 0


async def _run(
    task: Task, samples: Sequence[TaskSample], url: str, options: EvalOptions
) -> list[dict[str, Any]]:
    """A line for each attempt at each sample."""
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
                output = as_output(await task.rollout(sample, model))
            except Exception as error:  # noqa: BLE001 - whatever a rollout raised is recorded
                return line | {"error": failure_line(error)}
        return line | output.model_dump(mode="json", exclude_none=True)

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


def _print(lines: Sequence[Mapping[str, Any]], task_id: str, path: Path, console: Console) -> None:
    values: dict[str, list[float]] = defaultdict(list)
    scored = [line for line in lines if "error" not in line]
    for line in scored:
        values["reward"].append(_total(line["reward"]))
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


def _total(reward: float | list[float]) -> float:
    return sum(reward) if isinstance(reward, list) else reward
