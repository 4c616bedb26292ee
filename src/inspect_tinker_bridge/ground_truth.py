"""A task's prompt, found by running the solver up to its first model call.

Invariant: the messages are those of the first `generate()`, whatever the solver is; no model is called.
"""

from __future__ import annotations

import asyncio

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage

from inspect_tinker_bridge.episodes import PendingCalls
from inspect_tinker_bridge.errors import TaskFailedError
from inspect_tinker_bridge.pool import shared_pool
from inspect_tinker_bridge.runner import TaskRunner
from inspect_tinker_bridge.tasks import InspectTaskInfo, load_inspect_task

__all__ = ["get_ground_truth_messages", "ground_truth_of"]


async def get_ground_truth_messages(task: Task | InspectTaskInfo, sample: Sample) -> list[ChatMessage]:
    """Get the messages of the solver's first model call, or its final messages if it makes none.

    Raises TaskFailedError if the solver raises before that, and RunnerError. Waits while another task's
    episodes run on this event loop.
    """
    info = task if isinstance(task, InspectTaskInfo) else load_inspect_task(task)
    runner = await shared_pool().acquire(info)
    try:
        return await ground_truth_of(runner, sample)
    finally:
        await shared_pool().release()


async def ground_truth_of(runner: TaskRunner, sample: Sample) -> list[ChatMessage]:
    """The same with an open runner. A sample without an id gets a temporary one."""
    if sample.id is None:
        sample = sample.model_copy(update={"id": 1})
    pending = PendingCalls()
    episode = asyncio.ensure_future(runner.run(sample, pending))
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
