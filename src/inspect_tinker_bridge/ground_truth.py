"""Find a task's prompt by running the solver up to its first model call."""

from __future__ import annotations

import asyncio

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, Model

from inspect_tinker_bridge.episodes import PendingCalls, refusing_model
from inspect_tinker_bridge.errors import TaskFailedError
from inspect_tinker_bridge.pool import shared_pool
from inspect_tinker_bridge.runner import RunnerOptions, TaskRunner
from inspect_tinker_bridge.tasks import InspectTaskInfo, load_inspect_task

__all__ = ["get_ground_truth_messages", "ground_truth_of", "silent_roles"]


async def get_ground_truth_messages(task: Task | InspectTaskInfo, sample: Sample) -> list[ChatMessage]:
    """Return the messages of the solver's first model call, or its final messages without one.

    Waits while another event loop runs episodes. Raises RunnerError, and TaskFailedError if the solver first
    raises or needs the reply of a role's model.
    """
    info = task if isinstance(task, InspectTaskInfo) else load_inspect_task(task)
    runner = await shared_pool().acquire(info, silent_roles(info))
    try:
        return await ground_truth_of(runner, info, sample)
    finally:
        await shared_pool().release()


def silent_roles(info: InspectTaskInfo) -> RunnerOptions:
    """Options with which the models of the task's roles only raise errors."""
    roles: dict[str, str | Model] = {role: refusing_model(role) for role in info.task.model_roles or {}}
    return RunnerOptions(model_roles=roles or None)


async def ground_truth_of(runner: TaskRunner, info: InspectTaskInfo, sample: Sample) -> list[ChatMessage]:
    if sample.id is None:
        sample = sample.model_copy(update={"id": 1})
    pending = PendingCalls()
    episode = asyncio.ensure_future(runner.run(sample, pending, task=info, options=silent_roles(info)))
    try:
        call = await pending.next_call(episode)
        if call is not None:
            return list(call.request.messages)
        outcome = episode.result()
        if outcome.error is not None:
            raise TaskFailedError(outcome.sample_id, outcome.error, outcome.traceback)
        return outcome.messages
    finally:
        episode.cancel()
        await asyncio.wait({episode})
