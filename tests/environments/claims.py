"""Claimed episodes of a task, made without a server, and run as a worker runs them."""

from __future__ import annotations

from typing import Any, cast

from tinkerscript.client import Episode
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import Task
from tinkerscript.workers.worker import TaskRollout


def claim(task: Task, sample: dict[str, Any], url: str, number: int = 1) -> Episode:
    return Episode(
        episode_uuid=f"episode-{number}",
        attempt=1,
        payload={"task": task.task_id, "sample": sample},
        episode_type="train",
        group_id="g",
        openai_base_url=url,
        openai_api_key=f"key-{number}",
    )


async def run_claim(
    rollout: TaskRollout, task: Task, sample: Any, url: str, number: int = 1
) -> WorkflowOutput:
    return cast("WorkflowOutput", await rollout(claim(task, dict(sample), url, number)))
