"""Episodes run in the trainer's own process: the task's solver turned inside out into a Tinker `Env`.

tinker_cookbook's rollout loop drives the environment; its transitions become the same `Call`s that the
gateway records, so everything after this is one path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from uuid import uuid4

from inspect_ai.model import ChatMessage
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Trajectory, Transition

from inspect_tinker_bridge import BridgeError, InspectTaskInfo, RunnerError, TaskRunner, load_inspect_task
from inspect_tinker_bridge.conversation import to_dicts
from inspect_tinker_bridge.env import InspectEnv
from inspect_tinker_bridge.options import EnvOptions
from inspect_tinker_bridge.report import report_of
from inspect_tinker_bridge.samples import sample_from_json
from tinkerscript.config import RunConfig
from tinkerscript.errors import GatewayError, WorkerError
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.train.engine_sampler import check_lengths
from tinkerscript.train.journal import EpisodeAccepted, EpisodeFailed, EpisodeRegistered, Outcome
from tinkerscript.train.policy import Policy
from tinkerscript.train.renderer import model_renderer
from tinkerscript.train.source import EpisodeSource, PlannedEpisode

OWN_SOLVER = EnvOptions(env_type="task")
"""The task's own solver decides when it calls the model, and when it ends."""


class InProcessSource(EpisodeSource):
    """Runs up to `workers.concurrency` episodes at once over one persistent Inspect eval."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Raises ConfigError for an `engine.renderer` that is not known."""
        self._config = config
        self._policy = policy
        self._renderer = model_renderer(config.engine)
        self._stack = AsyncExitStack()
        self._tasks: dict[str, InspectTaskInfo] = {}
        self._runner: TaskRunner | None = None
        self._limit = asyncio.Semaphore(config.workers.concurrency)
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._reasons: dict[str, str] = {}
        """Why a running episode was cancelled."""

        self._ended: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()

    async def __aenter__(self) -> InProcessSource:
        tasks = self._config.all_tasks
        self._tasks = {task.name: load_inspect_task(task.name, **task.train_args) for task in tasks}
        self._runner = await self._stack.enter_async_context(TaskRunner(list(self._tasks.values())))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._stack.aclose()

    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        for episode in episodes:
            if episode.episode_uuid in self._running:
                continue
            task = asyncio.create_task(self._run(episode), name=f"episode {episode.episode_uuid}")
            # Not in the task itself: one that is cancelled before its first step runs no line of it.
            task.add_done_callback(partial(self._deliver, episode))
            self._running[episode.episode_uuid] = task

    def _deliver(self, episode: PlannedEpisode, task: asyncio.Task[Outcome]) -> None:
        """How an episode ended, whatever it is."""
        del self._running[episode.episode_uuid]
        reason = self._reasons.pop(episode.episode_uuid, "the run was stopped")
        if task.cancelled():
            self._ended.put_nowait(_failed(episode, "cancelled", reason))
        else:
            self._ended.put_nowait(task.exception() or task.result())

    async def outcomes(self) -> list[Outcome]:
        """Raises what broke an episode other than its own failure."""
        ended = await self._ended.get()
        if isinstance(ended, BaseException):
            raise ended
        return [ended]

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        for uuid in episode_uuids:
            if (task := self._running.get(uuid)) is not None:
                self._reasons[uuid] = reason
                task.cancel()

    async def lost(self, registered: Sequence[EpisodeRegistered]) -> list[EpisodeFailed]:
        """None: there is no server that could know more than the journal."""
        return []

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """They died with the process that ran them."""
        for event in registered:
            self._ended.put_nowait(_failed(event, "cancelled", reason))

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing waits for it: outcomes are delivered once, in memory."""

    async def flush(self) -> None:
        """Nothing was sent."""

    def publishing(self) -> None:
        """Nobody else needs to know."""

    async def publish(self, policy_version: int, global_step: int) -> None:
        """Nobody else needs to know: `Policy` is in this process."""

    async def _run(self, episode: PlannedEpisode) -> Outcome:
        """Raises WorkerError where the eval that drives all episodes died, and what the engine raises."""
        assert self._runner is not None
        sample = sample_from_json(episode.payload["sample"])
        async with self._limit:
            version = self._policy.version
            client = self._policy.noting()
            completer = TinkerTokenCompleter(
                client,  # pyright: ignore[reportArgumentType] - the same methods
                max_tokens=self._config.sampling.max_tokens,
                temperature=self._config.sampling.temperature,
            )
            task = self._tasks[episode.payload["task"]]
            env = InspectEnv(self._runner, sample, self._renderer, OWN_SOLVER, task=task)
            try:
                trajectory = await run_rollout(completer, env)
            except GatewayError as error:  # Beyond the context, which a client would be told by HTTP.
                return _failed(episode, error.code, str(error))
            except RunnerError as error:  # No episode can run any more: not this one's failure.
                raise WorkerError(str(error)) from error
            except BridgeError as error:
                return _failed(episode, "task_error", str(error))
            finally:
                await env.abandon()
        return _accepted(episode, env, trajectory, version, self._config.sampling.temperature, client.seeds)


def _failed(episode: PlannedEpisode | EpisodeRegistered, kind: str, reason: str) -> EpisodeFailed:
    failure = Failure(kind=kind, message=reason, attempt=1, client_uuid="trainer")
    return EpisodeFailed(
        episode_uuid=episode.episode_uuid,
        failures=[failure.model_dump()],
        episode_type=episode.episode_type,
        group_id=episode.group_id,
    )


def _accepted(
    episode: PlannedEpisode,
    env: InspectEnv,
    trajectory: Trajectory,
    version: int,
    temperature: float,
    seeds: list[int],
) -> EpisodeAccepted:
    assert env.outcome is not None
    assert env.scored is not None
    report = report_of(env.outcome, env.scored)
    metrics = dict(report.metrics)
    for transition in trajectory.transitions:
        metrics.update({k: float(v) for k, v in transition.metrics.items()})
    return EpisodeAccepted(
        episode_uuid=episode.episode_uuid,
        attempt=1,
        client_uuid="trainer",
        reward=sum(t.reward for t in trajectory.transitions),
        policy_version_at_claim=version,
        calls=calls_of(
            trajectory.transitions,
            env.exchanges,
            policy_version=version,
            temperature=temperature,
            seeds=seeds,
        ),
        metadata=report.metadata,
        log_metrics=metrics,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
    )


ModelExchange = tuple[list[ChatMessage], ChatMessage]
"""The messages of a prompt, and the answer."""


def calls_of(
    transitions: Sequence[Transition],
    exchanges: Sequence[ModelExchange] | None = None,
    *,
    policy_version: int,
    temperature: float,
    seeds: Sequence[int] | None = None,
) -> list[Call]:
    """Each transition as a call whose parent is the one before it, if its observation extends that one.

    `exchanges` has the messages of each, for people to read; `seeds`: with which each was sampled. Raises
    AlignmentError for other many log probabilities than tokens, and ConversionError for messages of more
    than text.
    """
    calls: list[Call] = []
    before: list[int] = []
    seen = 0
    nothing: list[ModelExchange | None] = [None] * len(transitions)
    for number, (transition, exchange) in enumerate(zip(transitions, exchanges or nothing, strict=True)):
        prompt = transition.ob.to_ints()
        action = transition.ac
        check_lengths(action.tokens, action.maybe_logprobs)
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
                seed=seeds[number] if seeds is not None else None,
                break_cause="history_edited" if calls and not extends else None,
                messages=json.dumps(to_dicts(exchange[0][seen if extends else 0 :]) if exchange else []),
                reply=json.dumps(to_dicts([exchange[1]])[0] if exchange else {}),
            )
        )
        seen = len(exchange[0]) + 1 if exchange else 0
        before = prompt + action.tokens
    return calls
