"""Inspect tasks: each episode runs one sample with the task's solver and scorers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Score

from inspect_tinker_bridge import (
    BridgeError,
    EpisodeOutcome,
    EpisodeReward,
    GenerateRequest,
    RunnerOptions,
    SandboxConfig,
    TaskRunner,
    load_inspect_task,
    score_episode,
)
from inspect_tinker_bridge.conversion import ChatConverter, sample_summary, unapplied
from inspect_tinker_bridge.records import pack_transcript
from inspect_tinker_bridge.sandbox import check_provider
from inspect_tinker_bridge.scoring import report_of, to_number
from tinkerscript.errors import ClaimLostError, ConfigError, WorkerError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample


class InspectTask(Task):
    """An Inspect task: `file.py@name`, or a registered name.

    The task function's arguments choose the samples: training and evaluation use the task's whole dataset.
    """

    def __init__(self, name: str, /, **args: Any) -> None:
        try:
            self.info = load_inspect_task(name, **args)
        except BridgeError as error:
            raise ConfigError(str(error)) from error
        self.task_id = self.info.task_id
        self.temperature = self.info.task.config.temperature
        self.options = RunnerOptions()
        self._by_id = {str(sample.id): sample for sample in self.info.samples}
        self._eval: _SharedEval | None = None

    def replace_sandbox(self, sandbox: str) -> None:
        """Raises ConfigError unless `sandbox` is `TYPE` or `TYPE:CONFIG_FILE`."""
        kind, _, config = sandbox.partition(":")
        try:
            self.options = replace(self.options, sandbox=SandboxConfig(kind, config or None))
        except BridgeError as error:
            raise ConfigError(str(error)) from error

    @property
    def sandbox_type(self) -> str | None:
        return self.options.sandbox.sandbox_type if self.options.sandbox else self.info.sandbox_type

    def samples(self, *, held_out: bool) -> list[dict[str, Any]]:
        return self._summaries

    @cached_property
    def _summaries(self) -> list[dict[str, Any]]:
        return [sample_summary(sample) for sample in self.info.samples]

    def own_sample(self, sample_id: str, *, held_out: bool) -> TaskSample | None:
        sample = self._by_id.get(sample_id)
        return None if sample is None else sample_summary(sample)

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        """Raises TaskFailedError if the task's code raises."""
        assert self._eval is not None, "a rollout runs inside `resources`"
        policy = GatewayPolicy(model, self._by_id[str(sample["id"])])
        records: list[EvalSample] = []
        try:
            outcome = await self._eval.run(self, policy, records.append)
        finally:
            if records and policy.lost is None and (limit := model.max_transcript_bytes):
                await model.record_transcript(await asyncio.to_thread(pack_transcript, records[0], limit))
        if policy.lost is not None:
            raise policy.lost
        return _output(outcome, score_episode(outcome), policy)

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        """Run one eval for all tasks, because Inspect allows one per process."""
        shared = _SharedEval(tasks)
        for task in tasks:
            task._eval = shared
        try:
            for kind in {task.sandbox_type for task in tasks} - {None}:
                await asyncio.to_thread(check_provider, kind)
            await shared.runner()
        except BridgeError as error:
            raise WorkerError(str(error)) from error
        try:
            yield
        finally:
            await shared.aclose()


class _SharedEval:
    """If it dies, the next episode restarts it."""

    def __init__(self, tasks: Sequence[InspectTask]) -> None:
        self._tasks = tasks
        self._runner: TaskRunner | None = None
        self._opening = asyncio.Lock()

    async def run(
        self, task: InspectTask, policy: GatewayPolicy, on_record: Callable[[EvalSample], None]
    ) -> EpisodeOutcome:
        runner = await self.runner()
        options = replace(task.options, policy_roles=policy.model.roles)
        await runner.add(task.info, options)
        return await runner.run(policy.sample, policy, task=task.info, options=options, on_record=on_record)

    async def runner(self) -> TaskRunner:
        if self._runner is not None and self._runner.is_open:
            return self._runner
        async with self._opening:
            if self._runner is None or not self._runner.is_open:
                first, *others = self._tasks
                runner = await TaskRunner(first.info, first.options).__aenter__()
                self._runner = runner
                for task in others:
                    await runner.add(task.info, task.options)
            return self._runner

    async def aclose(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.__aexit__(None, None, None)


class GatewayPolicy:
    def __init__(self, model: EpisodeModel, sample: Sample) -> None:
        self.model = model
        self.sample = sample
        self._converter = ChatConverter()
        self.unapplied: set[str] = set()  # Settings that requests do not carry, as `name=value`.
        self.reply_ids = list[str]()
        self.calls = 0  # Includes an agent's calls.
        self.lost: ClaimLostError | None = None

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        self.unapplied.update(unapplied(request.config))
        body = self._converter.request(request.messages, request.tools, request.tool_choice, request.config)
        body["model"] = request.role or self.model.name
        try:
            endpoint, key = self.model.endpoint, self.model.api_key
            completion = await endpoint.complete(self.model.base_url, key, body)
        except ClaimLostError as error:
            self.lost = error
            raise
        if not request.role:
            self.calls += 1
            self.reply_ids.append(completion["id"])
        return self._converter.output(completion)


def _output(outcome: EpisodeOutcome, scored: EpisodeReward, policy: GatewayPolicy) -> WorkflowOutput:
    report = report_of(outcome, scored, policy.unapplied)
    return WorkflowOutput(
        reward=scored.reward,
        call_rewards=call_rewards(outcome.scores, policy.reply_ids),
        metadata=report.metadata,
        log_metrics={**report.metrics, "model_calls": float(policy.calls)},
    )


IN_METADATA = "call_rewards"


def call_rewards(scores: Mapping[str, Score], reply_ids: Sequence[str]) -> dict[str, float]:
    """Sum the rewards that scorers gave single calls, in `Score.metadata["call_rewards"]`.

    They are a list with a number for each model call, or a dict by the ids of assistant messages. Raises
    WorkerError for anything else.
    """
    total = dict[str, float]()
    for name, score in scores.items():
        given: Any = (score.metadata or {}).get(IN_METADATA)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            given = list(given) if isinstance(given, Sequence) else [given]
            if len(given) != len(reply_ids):
                raise WorkerError(
                    f"the scorer {name!r}: metadata[{IN_METADATA!r}] has {len(given)} numbers, and the "
                    f"episode has {len(reply_ids)} model calls; give one for each, or a dict by message id"
                )
            given = dict(zip(reply_ids, given, strict=True))
        for reply_id, reward in cast("Mapping[str, object]", given).items():
            number = to_number(reward)
            if number is None:
                raise WorkerError(
                    f"the scorer {name!r}: metadata[{IN_METADATA!r}] has {reward!r} for the call "
                    f"{reply_id}, which is not a finite number"
                )
            total[reply_id] = total.get(reply_id, 0.0) + number
    return total
