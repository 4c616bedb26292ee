"""Episodes run in the trainer's own process: the task's solver turned inside out into a Tinker `Env`.

tinker_cookbook's rollout loop drives the environment; its transitions become the same `Call`s that the
gateway records, so everything after this is one path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

from inspect_ai.dataset import Sample
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Trajectory, Transition

from inspect_tinker_bridge import BridgeError, TaskRunner, load_inspect_task
from inspect_tinker_bridge.env import EnvOptions, InspectEnv
from tinkerscript.config import RunConfig
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.train.journal import EpisodeAccepted, EpisodeFailed, Outcome
from tinkerscript.train.policy import Policy
from tinkerscript.train.source import EpisodeSource, PlannedEpisode

OWN_SOLVER = EnvOptions(env_type="task")
"""The task's own solver decides when it calls the model, and when it ends."""


class InProcessSource(EpisodeSource):
    """Runs up to `workers.concurrency` episodes at once over one persistent Inspect eval."""

    def __init__(self, config: RunConfig, policy: Policy, renderer: Renderer) -> None:
        self._config = config
        self._policy = policy
        self._renderer = renderer
        self._stack = AsyncExitStack()
        self._runner: TaskRunner | None = None

    async def __aenter__(self) -> InProcessSource:
        task = load_inspect_task(self._config.task.name, **self._config.task.train_args)
        self._runner = await self._stack.enter_async_context(TaskRunner(task))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def run(self, episodes: Sequence[PlannedEpisode]) -> AsyncIterator[list[Outcome]]:
        limit = asyncio.Semaphore(self._config.workers.concurrency)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run_one(episode, limit)) for episode in episodes]
            for task in asyncio.as_completed(tasks):
                yield [await task]

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing waits for it: outcomes are delivered once, in memory."""

    async def flush(self) -> None:
        """Nothing was sent."""

    async def publish(self, policy_version: int, global_step: int) -> None:
        """Nobody else needs to know: `Policy` is in this process."""

    async def _run_one(self, episode: PlannedEpisode, limit: asyncio.Semaphore) -> Outcome:
        assert self._runner is not None
        sample = Sample.model_validate(episode.payload["sample"])
        async with limit:
            version = self._policy.version
            completer = TinkerTokenCompleter(
                self._policy.client,  # pyright: ignore[reportArgumentType] - the same methods
                max_tokens=self._config.sampling.max_tokens,
                temperature=self._config.sampling.temperature,
            )
            env = InspectEnv(self._runner, sample, self._renderer, OWN_SOLVER)
            try:
                trajectory = await run_rollout(completer, env)
            except BridgeError as error:
                failure = Failure(kind="task_error", message=str(error), attempt=1, client_uuid="trainer")
                return EpisodeFailed(episode_uuid=episode.episode_uuid, failures=[failure.model_dump()])
            finally:
                await env.abandon()
        return _accepted(episode, trajectory, version, self._config.sampling.temperature)


def _accepted(
    episode: PlannedEpisode, trajectory: Trajectory, version: int, temperature: float
) -> EpisodeAccepted:
    metrics: dict[str, float] = {}
    for transition in trajectory.transitions:
        metrics.update({k: float(v) for k, v in transition.metrics.items()})
    return EpisodeAccepted(
        episode_uuid=episode.episode_uuid,
        attempt=1,
        client_uuid="trainer",
        reward=sum(t.reward for t in trajectory.transitions),
        policy_version_at_claim=version,
        calls=calls_of(trajectory.transitions, policy_version=version, temperature=temperature),
        log_metrics=metrics,
    )


def calls_of(transitions: Sequence[Transition], *, policy_version: int, temperature: float) -> list[Call]:
    """Each transition as a call whose parent is the one before it, if its observation extends that one."""
    calls: list[Call] = []
    before: list[int] = []
    for transition in transitions:
        prompt = transition.ob.to_ints()
        action = transition.ac
        extends = bool(calls) and prompt[: len(before)] == before
        calls.append(
            Call(
                call_id=uuid4().hex,
                parent_id=calls[-1].call_id if extends else None,
                new_prompt=pack_ids(prompt[len(before) :] if extends else prompt),
                sampled=pack_ids(action.tokens),
                logprobs=pack_logprobs(action.maybe_logprobs or []),
                stop_reason="length" if action.stop_reason == "length" else "stop",
                policy_version=policy_version,
                temperature=temperature,
                break_cause="history_edited" if calls and not extends else None,
            )
        )
        before = prompt + action.tokens
    return calls
