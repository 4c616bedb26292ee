"""The worker for Inspect tasks: each claimed episode is one sample, run by the task's own solver and scorers.

Invariant: every model call goes through the episode's own key to the gateway, which records its tokens; a
solver or scorer that raises is an error, never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import Model, ModelOutput
from pydantic import JsonValue

from inspect_tinker_bridge import (
    EpisodeOutcome,
    EpisodeReward,
    GenerateRequest,
    InspectTaskInfo,
    RunnerOptions,
    TaskRunner,
    load_inspect_task,
    score_episode,
)
from inspect_tinker_bridge.report import report_of
from inspect_tinker_bridge.samples import sample_from_json
from tinkerscript.client import Episode
from tinkerscript.errors import ClaimLostError, WorkerError, WrongTaskError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.inspect_endpoint import ChatEndpoint
from tinkerscript.workers.inspect_messages import Conversation


class InspectRollout:
    """A rollout function for `tinkerscript.client.run`: `await rollout(episode)` is one episode.

    One per process, since Inspect runs one eval per process; any number of calls at once. The eval starts
    with the first call and ends with `aclose` or the end of `async with`; one that died is started again.
    """

    def __init__(
        self,
        tasks: str | Mapping[str, Mapping[str, Any]],
        *,
        scorer_weights: Mapping[str, float] | None = None,
        model_roles: Mapping[str, str | Model] | None = None,
        endpoint: ChatEndpoint | None = None,
    ) -> None:
        """Load the tasks. Raises the errors of `inspect_tinker_bridge.load_inspect_task`.

        `tasks` are the specs that episodes name in `payload["task"]`, each with the arguments of its task;
        `endpoint` replaces the connections.
        """
        specs: Mapping[str, Mapping[str, Any]] = {tasks: {}} if isinstance(tasks, str) else tasks
        self._tasks = {name: load_inspect_task(name, **dict(args)) for name, args in specs.items()}
        self._weights = scorer_weights
        self._options = RunnerOptions(model_roles=model_roles)
        self._endpoint = endpoint or ChatEndpoint()
        self._runner: TaskRunner | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> InspectRollout:
        await self._open_runner()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __call__(self, episode: Episode) -> WorkflowOutput:
        """Run the episode's sample to its score.

        Raises ClaimLostError, WrongTaskError, WorkerError for a payload that holds no sample, TaskFailedError
        when the solver or a scorer raised, and the endpoint's errors when the model cannot be reached.
        """
        task, sample = self._task(episode.payload), _sample(episode.payload)
        policy = _GatewayPolicy(self._endpoint, episode)
        runner = await self._open_runner()
        outcome = await runner.run(sample, policy, task=task)
        if policy.lost is not None:
            raise policy.lost
        return _output(outcome, score_episode(outcome, self._weights), policy.calls)

    async def aclose(self) -> None:
        """End the eval and close the connections."""
        runner, self._runner = self._runner, None
        try:
            if runner is not None:
                await runner.__aexit__(None, None, None)
        finally:
            await self._endpoint.aclose()

    async def _open_runner(self) -> TaskRunner:
        if self._runner is not None and self._runner.is_open:
            return self._runner
        async with self._opening:
            if self._runner is None or not self._runner.is_open:
                self._runner = await TaskRunner(list(self._tasks.values()), self._options).__aenter__()
            return self._runner

    def _task(self, payload: Mapping[str, JsonValue]) -> InspectTaskInfo:
        named = payload.get("task")
        if not isinstance(named, str) or named not in self._tasks:
            runs = ", ".join(map(repr, self._tasks))
            raise WrongTaskError(f"the episode is of the task {named!r}, this worker runs {runs}")
        return self._tasks[named]


def _sample(payload: Mapping[str, JsonValue]) -> Sample:
    try:
        sample = sample_from_json(payload.get("sample"))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:  # no mapping, no input
        raise WorkerError(f"the episode's payload holds no Inspect sample: {error}") from error
    if sample.id is None:
        raise WorkerError("the episode's sample has no id")
    return sample


class _GatewayPolicy:
    """Answers the model calls of one episode from its gateway endpoint."""

    def __init__(self, endpoint: ChatEndpoint, episode: Episode) -> None:
        self._endpoint = endpoint
        self._url = episode.openai_base_url
        self._key = episode.openai_api_key
        self._conversation = Conversation()
        self.calls = 0
        self.lost: ClaimLostError | None = None

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        body = self._conversation.request(
            request.messages, request.tools, request.tool_choice, request.config
        )
        try:
            completion = await self._endpoint.complete(self._url, self._key, body)
        except ClaimLostError as error:
            self.lost = error
            raise
        self.calls += 1
        return self._conversation.output(completion)


def _output(outcome: EpisodeOutcome, scored: EpisodeReward, calls: int) -> WorkflowOutput:
    report = report_of(outcome, scored)
    return WorkflowOutput(
        reward=scored.reward,
        metadata=report.metadata,
        log_metrics={**report.metrics, "model_calls": float(calls)},
    )
