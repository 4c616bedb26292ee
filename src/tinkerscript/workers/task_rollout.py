"""`TaskRollout`: what a worker runs for tasks: each claimed episode is one sample of one of them.

Invariant: an episode of a task that this worker does not run is given back, for another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from pydantic import JsonValue

from tinkerscript.client import Episode
from tinkerscript.client.episode import RolloutResult
from tinkerscript.errors import WorkerError, WrongTaskError
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample
from tinkerscript.workers.chat_endpoint import ChatEndpoint


class TaskRollout:
    """A rollout function for `tinkerscript.client.run`: `await rollout(episode)` runs one episode.

    Takes any number of calls at once, inside its `async with` block.
    """

    def __init__(self, tasks: Mapping[str, Task], *, endpoint: ChatEndpoint | None = None) -> None:
        """`tasks`: each by its name as it was given. An episode names one of them in `payload["task"]`, with
        or without its folder. `endpoint` replaces the model endpoint."""
        self._loaded = list(tasks.values())
        self._tasks = {task.task_id: task for task in self._loaded} | dict(tasks)
        self._endpoint = endpoint or ChatEndpoint()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TaskRollout:
        kinds = {
            type(task): [each for each in self._loaded if type(each) is type(task)] for task in self._loaded
        }
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._endpoint.aclose)
            for kind, tasks in kinds.items():
                await stack.enter_async_context(kind.resources(tasks))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def __call__(self, episode: Episode) -> RolloutResult:
        """Run the episode's sample and score it.

        Raises WrongTaskError, WorkerError for a payload without a task or a sample, and what the task's
        rollout raises: ClaimLostError, the endpoint's errors, and its own.
        """
        task, sample = self._task(episode.payload), _sample(episode.payload)
        model = EpisodeModel(
            base_url=episode.openai_base_url,
            api_key=episode.openai_api_key,
            endpoint=self._endpoint,
            claim=episode,
        )
        return await task.rollout(sample, model)

    def _task(self, payload: Mapping[str, JsonValue]) -> Task:
        named = payload.get("task")
        if not isinstance(named, str):  # No worker could run it: its own failure, not this worker's.
            raise WorkerError("the episode's payload names no task, so there is no sample to run")
        if named not in self._tasks:
            runs = ", ".join(repr(task.task_id) for task in self._loaded)
            raise WrongTaskError(f"the episode is of the task {named!r}, this worker runs {runs}")
        return self._tasks[named]


def _sample(payload: Mapping[str, JsonValue]) -> TaskSample:
    sample = payload.get("sample")
    if not isinstance(sample, dict):
        raise WorkerError(f"the episode's payload holds no sample: {str(sample)[:100]}")
    if sample.get("id") is None:
        raise WorkerError("the episode's sample has no id")
    return sample
