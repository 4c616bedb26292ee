"""`InProcessSource`: episodes run in the trainer's process, each a Tinker `Env` made of the task's solver.

tinker_cookbook's rollout loop drives the environment. Its transitions become the same `Call`s that the
gateway records, so everything after this is one path.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from uuid import uuid4

import tinker
from inspect_ai.model import ChatMessage
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Trajectory, Transition

from inspect_tinker_bridge import BridgeError, InspectTaskInfo, RunnerError, TaskRunner, load_inspect_task
from inspect_tinker_bridge.conversion import sample_from_json, to_dicts
from inspect_tinker_bridge.env import EnvOptions, InspectEnv
from inspect_tinker_bridge.scoring import report_of
from inspect_tinker_bridge.transcript import pack_transcript
from tinkerscript.config import RunConfig
from tinkerscript.errors import GatewayError, WorkerError
from tinkerscript.gateway.conversation.fork_reasons import RENDERER_REFUSED, TEMPLATE_REWRITES
from tinkerscript.gateway.conversation.tree import MessageIndex, Node, Turn
from tinkerscript.gateway.sampler import Sampler, SampleRequest
from tinkerscript.protocol import Failure, bounded
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from tinkerscript.train.journal import (
    QUARANTINED,
    EpisodeAccepted,
    EpisodeFailed,
    EpisodeRegistered,
    Outcome,
)
from tinkerscript.train.policy import Policy, check_lengths
from tinkerscript.train.renderer import ModelRenderer, model_renderer
from tinkerscript.train.sources.source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import BatchProgress

logger = logging.getLogger(__name__)

OWN_SOLVER = EnvOptions(env_type="task")
"""The task's own solver decides when it calls the model, and when it ends."""


class InProcessSource(EpisodeSource):
    """Runs up to `workers.concurrency` episodes at once over one persistent Inspect eval."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Raises ConfigError for an `engine.renderer` that is unknown or does not fit the model."""
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

        self._failed_calls: dict[str, list[Call]] = {}
        """Of episodes that failed, until their outcome is taken."""

        self._transcripts: dict[str, bytes] = {}
        """Of episodes that have ended, until their outcome is taken."""

        self._ended: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()

    async def __aenter__(self) -> InProcessSource:
        tasks = self._config.all_tasks
        loaded = [load_inspect_task(task.name, **task.train_args) for task in tasks]
        self._tasks = {info.task_id: info for info in loaded}
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
            # Not at the end of the task: a task cancelled before its first step never runs.
            task.add_done_callback(partial(self._deliver, episode))
            self._running[episode.episode_uuid] = task

    def _deliver(self, episode: PlannedEpisode, task: asyncio.Task[Outcome]) -> None:
        """Queue the episode's outcome, or what its task raised."""
        del self._running[episode.episode_uuid]
        reason = self._reasons.pop(episode.episode_uuid, "the run was stopped")
        if task.cancelled():
            self._ended.put_nowait(_failed(episode, "cancelled", reason))
        else:
            self._ended.put_nowait(task.exception() or task.result())

    async def outcomes(self) -> list[Outcome]:
        """Raises an error that is not the episode's own failure, such as a dead eval."""
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
        """None: there is no server that could know more than the journal does."""
        return []

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """They died with the process that ran them."""
        for event in registered:
            self._ended.put_nowait(_failed(event, "cancelled", reason))

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: outcomes are delivered once, in memory."""

    async def flush(self) -> None:
        """Nothing to do: nothing is sent."""

    def accepts(self, policy_versions: Sequence[int]) -> None:
        """Nothing to do: nobody asks whether an episode is worth finishing."""

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        """Nothing to do: nobody asks how far the batch is."""

    def failed_calls(self, episode_uuid: str) -> Mapping[int, list[Call]]:
        calls = self._failed_calls.pop(episode_uuid, [])
        return {1: calls} if calls else {}

    def transcripts(self, episode_uuid: str) -> Mapping[int, bytes]:
        transcript = self._transcripts.pop(episode_uuid, b"")
        return {1: transcript} if transcript else {}

    def publishing(self) -> None:
        """Nothing to do: a running episode keeps its version."""

    async def publish(self, policy_version: int, global_step: int) -> None:
        """Nothing to do: `Policy` is in this process."""

    async def _run(self, episode: PlannedEpisode) -> Outcome:
        """Raises WorkerError if the eval that drives all episodes died, and whatever sampling raises."""
        assert self._runner is not None
        sample = sample_from_json(episode.payload["sample"])
        async with self._limit:
            version = self._policy.version  # The whole episode is sampled by one version.
            completer = PolicyCompleter(
                self._policy.sampler,
                max_tokens=self._config.sampling.max_tokens,
                temperature=self._config.sampling.temperature,
            )
            task = self._tasks[episode.payload["task"]]
            env = InspectEnv(self._runner, sample, self._renderer, OWN_SOLVER, task=task)
            try:
                trajectory = await run_rollout(completer, env)
            except (
                GatewayError
            ) as error:  # Such as a prompt beyond the context: HTTP clients get it as a 400.
                return _failed(episode, error.code, str(error))
            except RunnerError as error:  # Not this episode's failure: no episode can run any more.
                raise WorkerError(str(error)) from error
            except BridgeError as error:
                return _failed(episode, "task_error", str(error))
            finally:
                await env.abandon()
                await self._keep_transcript(episode.episode_uuid, env)
                if env.outcome is None:
                    self._keep_calls(episode.episode_uuid, completer, env, version)
        calls = self._calls(trajectory.transitions, env.exchanges, completer, version)
        outcome = _accepted(episode, env, trajectory, calls, version)
        if isinstance(outcome, EpisodeFailed):
            self._failed_calls[episode.episode_uuid] = calls
        return outcome

    def _keep_calls(self, uuid: str, completer: PolicyCompleter, env: InspectEnv, version: int) -> None:
        """Keep what an episode sampled that failed, for the run's record."""
        transitions = [Transition(ob, ac, 0.0, episode_done=False) for ob, ac in completer.sampled]
        exchanges = env.exchanges if len(env.exchanges) == len(transitions) else None
        try:
            self._failed_calls[uuid] = self._calls(transitions, exchanges, completer, version)
        except BridgeError as error:  # Such as messages that are not text.
            logger.info("episode.calls_not_kept episode_uuid=%s error=%s", uuid, error)

    async def _keep_transcript(self, uuid: str, env: InspectEnv) -> None:
        limit = self._config.max_transcript_bytes
        if limit and env.record is not None:
            self._transcripts[uuid] = await asyncio.to_thread(pack_transcript, env.record, limit)

    def _calls(
        self,
        transitions: Sequence[Transition],
        exchanges: Sequence[ModelExchange] | None,
        completer: PolicyCompleter,
        version: int,
    ) -> list[Call]:
        return calls_of(
            transitions,
            exchanges,
            uses_template=isinstance(self._renderer, ModelRenderer) and self._renderer.uses_template,
            policy_version=version,
            temperature=self._config.sampling.temperature,
            seeds=completer.seeds,
        )


class PolicyCompleter(TokenCompleter):
    """A `Sampler` as tinker_cookbook's completer."""

    def __init__(self, sampler: Sampler, *, max_tokens: int, temperature: float) -> None:
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._temperature = temperature
        self.seeds: list[int | None] = []
        """One for each call, in order."""

        self.sampled: list[tuple[tinker.ModelInput, TokensWithLogprobs]] = []
        """Prompt and reply of each call."""

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        request = SampleRequest(
            prompt=pack_ids(model_input.to_ints()),
            max_tokens=min(self._max_tokens, max_tokens or self._max_tokens),
            temperature=self._temperature,
            stop_token_ids=[item for item in stop if isinstance(item, int)],
            stop=[item for item in stop if isinstance(item, str)],
        )
        result = await self._sampler.sample(request)
        (sequence,) = result.sequences
        self.seeds.append(result.seed)
        reply = TokensWithLogprobs(
            tokens=unpack_ids(sequence.sampled).tolist(),
            maybe_logprobs=unpack_logprobs(sequence.logprobs).tolist(),
            stop_reason="length" if sequence.stop_reason == "length" else "stop",
        )
        self.sampled.append((model_input, reply))
        return reply


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
    calls: list[Call],
    version: int,
) -> Outcome:
    """The result; a failure if its reward is out of bounds."""
    assert env.outcome is not None
    assert env.scored is not None
    reward = sum(t.reward for t in trajectory.transitions)
    try:
        bounded("reward", reward)
    except ValueError as error:
        return _failed(episode, QUARANTINED, str(error))
    report = report_of(env.outcome, env.scored)
    metrics = dict(report.metrics)
    for transition in trajectory.transitions:
        metrics.update({k: float(v) for k, v in transition.metrics.items()})
    return EpisodeAccepted(
        episode_uuid=episode.episode_uuid,
        attempt=1,
        client_uuid="trainer",
        reward=reward,
        policy_version_at_claim=version,
        all_calls=calls,
        metadata=report.metadata,
        log_metrics=metrics,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
    )


ModelExchange = tuple[list[ChatMessage], ChatMessage]
"""A prompt's messages, and the model's reply."""


def calls_of(
    transitions: Sequence[Transition],
    exchanges: Sequence[ModelExchange] | None = None,
    *,
    uses_template: bool = False,
    policy_version: int,
    temperature: float,
    seeds: Sequence[int | None] | None = None,
) -> list[Call]:
    """Each transition as a call; its parent is the call whose prompt and sampled ids its prompt starts with.

    `exchanges`: each one's messages, for people to read, and to say why a prompt extends no call;
    `uses_template`: whether a chat template wrote the prompts; `seeds`: the seed each was sampled with.
    Raises AlignmentError if token and logprob counts differ, and UnsupportedError for messages that are not
    text.
    """
    calls: list[Call] = []
    streams: list[bytes] = []
    spoken = _Conversations(TEMPLATE_REWRITES if uses_template else RENDERER_REFUSED)
    nothing: list[ModelExchange | None] = [None] * len(transitions)
    for number, (transition, exchange) in enumerate(zip(transitions, exchanges or nothing, strict=True)):
        prompt = pack_ids(transition.ob.to_ints())
        action = transition.ac
        check_lengths(len(action.tokens), len(action.maybe_logprobs or []))
        extended = [place for place, stream in enumerate(streams) if prompt.startswith(stream)]
        parent = max(extended, key=lambda place: len(streams[place]), default=None)
        new_messages, reply, fork_reason = spoken.add(exchange, parent)
        calls.append(
            Call(
                call_id=uuid4().hex,
                parent_id=None if parent is None else calls[parent].call_id,
                new_prompt=prompt if parent is None else prompt[len(streams[parent]) :],
                sampled=pack_ids(action.tokens),
                logprobs=pack_logprobs(action.maybe_logprobs or []),
                stop_reason="length" if action.stop_reason == "length" else "stop",
                policy_version=policy_version,
                temperature=temperature,
                seed=seeds[number] if seeds is not None else None,
                fork_reason=fork_reason,
                messages=json.dumps(new_messages),
                reply=json.dumps(reply),
            )
        )
        streams.append(prompt + calls[-1].sampled)
    return calls


class _Conversations:
    """The messages of an episode's calls, which name the reasons of forks as the gateway does."""

    def __init__(self, refusal: str) -> None:
        """`refusal`: why a prompt may not extend the call that its messages continue."""
        self._refusal = refusal
        self._index = MessageIndex()
        self._nodes: list[Node] = []

    def add(
        self, exchange: ModelExchange | None, parent: int | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any], str | None]:
        """(new messages, reply, fork reason) of the next call, which extends the call with the number
        `parent`."""
        if exchange is None:
            return [], {}, None
        messages, (reply,) = to_dicts(exchange[0]), to_dicts([exchange[1]])
        path = self._index.walk(messages, b"")
        reason = None
        if parent is None:
            continued = 0 < path.history_length < len(messages) and self._index.find(path)
            reason = self._refusal if continued else self._index.fork_reason(path)
        before = None if parent is None else self._nodes[parent]
        turn = Turn(
            parent=before,
            prompt=b"",
            new_prompt=b"",
            fork_reason=reason,
            new_messages=messages[before.reply_index + 1 if before else 0 :],
            tools=[],
            reply_index=len(messages),
        )
        self._nodes.append(Node(turn, uuid4().hex, b"", reply))
        self._index.add(self._nodes[-1])
        return turn.new_messages, reply, reason
