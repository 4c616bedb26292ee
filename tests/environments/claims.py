"""Claimed episodes of a task, made without a server, and run as a worker runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from tinkerscript.client import Episode
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import Task
from tinkerscript.workers.worker import TaskRollout


def claim(task: Task, sample: Any, url: str, number: int) -> Episode:
    return Episode(
        episode_uuid=f"episode-{number}",
        attempt=1,
        payload={"task": task.task_id, "sample": dict(sample)},
        episode_type="train",
        group_id="g",
        openai_base_url=url,
        openai_api_key=f"key-{number}",
    )


async def run_all(task: Task, url: str, samples: Sequence[Any] = ()) -> list[WorkflowOutput]:
    """The results of all samples of a task, or of these, which a worker runs at once."""
    chosen = enumerate(samples or task.samples(held_out=False))
    async with TaskRollout({task.task_id: task}) as rollout:
        outputs = await asyncio.gather(*(rollout(claim(task, each, url, number)) for number, each in chosen))
    return cast("list[WorkflowOutput]", outputs)
