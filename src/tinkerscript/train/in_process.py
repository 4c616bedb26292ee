"""`InProcessSource`: episodes run in the trainer's process, each a Tinker `Env` made of the task's solver.

tinker_cookbook's rollout loop drives the environment. Its transitions become the same `Call`s that the
gateway records, so everything after this is one path.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import tinker
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, GenerateConfig
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Trajectory, Transition

from inspect_tinker_bridge import (
    BridgeError,
    InspectTaskInfo,
    RunnerError,
    RunnerOptions,
    SandboxConfig,
    TaskRunner,
    load_inspect_task,
)
from inspect_tinker_bridge.conversion import to_dicts
from inspect_tinker_bridge.env import EnvOptions, InspectEnv
from inspect_tinker_bridge.records import pack_transcript
from inspect_tinker_bridge.scoring import report_of
from tinkerscript.config import RunConfig, SamplingConfig
from tinkerscript.errors import AlignmentError, GatewayError, WorkerError
from tinkerscript.gateway.conversation.tree import (
    RENDERER_REFUSED,
    TEMPLATE_REWRITES,
    MessageIndex,
    Node,
    PromptIndex,
    Turn,
)
from tinkerscript.protocol import Failure, bounded, failure_line
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from tinkerscript.sampler import Sampler, SampleRequest
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode, failed_episode
from tinkerscript.train.journal import QUARANTINED, EpisodeRegistered
from tinkerscript.train.policy import Policy, check_lengths
from tinkerscript.train.renderer import ModelRenderer
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome

logger = logging.getLogger(__name__)

PROGRAMS_OWN = frozenset({"temperature", "top_p", "top_k", "max_tokens"})
"""What a task or its solver may choose of the sampling parameters, as through the server."""

OWN_SOLVER = EnvOptions(env_type="task", applied=PROGRAMS_OWN)
"""The task's own solver decides when it calls the model, and when it ends."""


class InProcessSource(EpisodeSource):
    """Runs up to `workers.concurrency` episodes at once over one persistent Inspect eval."""

    def __init__(self, config: RunConfig, policy: Policy, model: Path) -> None:
        """`model`: the folder of the model that samples. Raises ConfigError if it has no chat format."""
        self._config = config
        self._policy = policy
        self._renderer = ModelRenderer(model, config.engine.chat_template_kwargs)
        self._stack = AsyncExitStack()
        self._tasks: dict[tuple[str, bool], tuple[InspectTaskInfo, dict[str, Sample], EnvOptions]] = {}
        """By name, and whether it evaluates: the task, its samples by id, and how they run."""

        self._runner: TaskRunner | None = None
        self._limit = asyncio.Semaphore(config.workers.concurrency)
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._reasons: dict[str, str] = {}
        """Why a running episode was cancelled."""

        self._ended: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()

    async def __aenter__(self) -> InProcessSource:
        loaded: list[InspectTaskInfo] = []
        for task in self._config.all_tasks:
            kind, _, file = task.sandbox.partition(":")
            runner = RunnerOptions(sandbox=SandboxConfig(kind, file or None) if kind else None)
            options = replace(OWN_SOLVER, runner=runner)
            for held_out, args in enumerate((task.train_args, task.eval_args)):
                if not held_out or args != task.train_args:
                    loaded.append(load_inspect_task(task.name, **args))
                by_id = {str(sample.id): sample for sample in loaded[-1].samples}
                self._tasks[loaded[-1].task_id, bool(held_out)] = loaded[-1], by_id, options
        self._runner = await self._stack.enter_async_context(TaskRunner(loaded))
        for info, _, options in self._tasks.values():
            await self._runner.add(info, options.runner)
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
        """Queue the episode's outcome, or the error that ends the run."""
        del self._running[episode.episode_uuid]
        reason = self._reasons.pop(episode.episode_uuid, "the run was stopped")
        if task.cancelled():
            self._ended.put_nowait(_failed(episode, "cancelled", reason))
        elif (error := task.exception()) is None or isinstance(error, WorkerError | AlignmentError):
            self._ended.put_nowait(error or task.result())
        else:
            logger.error("episode.defect episode=%s", episode.episode_uuid, exc_info=error)
            self._ended.put_nowait(_failed(episode, "task_error", failure_line(error)))

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

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """They died with the process that ran them."""
        for event in registered:
            self._ended.put_nowait(_failed(event, "cancelled", reason))

    async def _run(self, episode: PlannedEpisode) -> Outcome:
        """Raises WorkerError if the eval that drives all episodes died, and AlignmentError (see `Policy`)."""
        assert self._runner is not None
        task, samples, options = self._tasks[episode.payload["task"], episode.episode_type == "eval"]
        sample = samples[str(episode.payload["sample"]["id"])]
        async with self._limit:
            version = self._policy.version  # The whole episode is sampled by one version.
            env = InspectEnv(self._runner, sample, self._renderer, options, task=task)
            completer = PolicyCompleter(
                self._policy.sampler, self._config.sampling, asked=lambda: env.generate_config
            )
            failure: EpisodeFailed | None = None
            trajectory: Trajectory | None = None
            try:
                trajectory = await run_rollout(completer, env)
            except GatewayError as error:  # Such as a prompt beyond the context: HTTP clients get a 400.
                failure = _failed(episode, error.code, str(error))
            except RunnerError as error:  # Not this episode's failure: no episode can run any more.
                raise WorkerError(str(error)) from error
            except AlignmentError:  # The sampler's fault, whoever asks.
                raise
            except Exception as error:  # noqa: BLE001 - whatever an episode raises is its own failure
                failure = _failed(episode, "task_error", failure_line(error))
            finally:
                await env.abandon()
        read = partial(
            calls_of,
            uses_template=self._renderer.uses_template,
            policy_version=version,
            parameters=completer.parameters,
        )
        if trajectory is None:
            assert failure is not None
            return await self._with_extras(failure, _calls_so_far(read, completer, env), env)
        calls = read(trajectory.transitions, env.exchanges)
        return await self._with_extras(_accepted(episode, env, trajectory, calls, version), calls, env)

    async def _with_extras(self, outcome: Outcome, calls: list[Call], env: InspectEnv) -> Outcome:
        limit = self._config.max_transcript_bytes
        packed = b""
        if limit and env.record is not None:
            packed = await asyncio.to_thread(pack_transcript, env.record, limit)
        return msgspec.structs.replace(
            outcome,
            failed_calls={1: calls} if calls and isinstance(outcome, EpisodeFailed) else {},
            transcripts={1: packed} if packed else {},
        )


def _calls_so_far(read: Callable[..., list[Call]], completer: PolicyCompleter, env: InspectEnv) -> list[Call]:
    """What an episode sampled that failed, for the run's record."""
    transitions = [Transition(ob, ac, 0.0, episode_done=False) for ob, ac in completer.sampled]
    exchanges = env.exchanges if len(env.exchanges) == len(transitions) else None
    try:
        return read(transitions, exchanges)
    except BridgeError as error:  # Such as messages that are not text.
        logger.info("episode.calls_not_kept error=%s", error)
        return []


@dataclass(eq=False)
class PolicyCompleter(TokenCompleter):
    """A `Sampler` as tinker_cookbook's completer."""

    sampler: Sampler
    sampling: SamplingConfig
    asked: Callable[[], GenerateConfig]
    """The config of the call that is answered next."""

    parameters: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """How each call was sampled, in order, as fields of `Call`."""

    sampled: list[tuple[tinker.ModelInput, TokensWithLogprobs]] = field(
        default_factory=list[tuple[tinker.ModelInput, TokensWithLogprobs]]
    )
    """Prompt and reply of each call."""

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        asked = self.asked()
        limit = asked.max_tokens or self.sampling.max_tokens
        distribution = self._distribution(asked)
        request = SampleRequest(
            prompt=pack_ids(model_input.to_ints()),
            max_tokens=min(limit, max_tokens or limit),
            **distribution,
            stop_token_ids=[item for item in stop if isinstance(item, int)],
            stop=[item for item in stop if isinstance(item, str)],
        )
        result = await self.sampler.sample(request)
        (sequence,) = result.sequences
        kind = result.logprob_kind
        self.parameters.append({**distribution, "seed": result.seed, "logprob_kind": kind})
        reply = TokensWithLogprobs(
            tokens=unpack_ids(sequence.sampled).tolist(),
            maybe_logprobs=unpack_logprobs(sequence.logprobs).tolist(),
            stop_reason="length" if sequence.stop_reason == "length" else "stop",
        )
        self.sampled.append((model_input, reply))
        return reply

    def _distribution(self, asked: GenerateConfig) -> dict[str, Any]:
        """As the gateway decides it (`gateway.sampled_model.SampledModel`)."""
        if self.sampling.precedence == "run":
            return {"temperature": self.sampling.temperature}
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"temperature": self.sampling.temperature, **chosen}


def _failed(episode: PlannedEpisode | EpisodeRegistered, kind: str, reason: str) -> EpisodeFailed:
    failure = Failure(kind=kind, message=reason, attempt=1, client_uuid="trainer")
    return failed_episode(episode, failure.model_dump())


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
    report = report_of(env.outcome, env.scored, env.unapplied)
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
    parameters: Sequence[Mapping[str, Any]] | None = None,
) -> list[Call]:
    """Each transition as a call; its parent is the call whose prompt and sampled ids its prompt starts with.

    `exchanges`: each one's messages, for people to read, and to say why a prompt extends no call;
    `uses_template`: whether a chat template wrote the prompts; `parameters`: how each was sampled, as fields
    of `Call`. Raises AlignmentError if token and logprob counts differ, and UnsupportedError for messages
    that are not text.
    """
    calls: list[Call] = []
    prompts, conversations = PromptIndex(), MessageIndex()
    refusal = TEMPLATE_REWRITES if uses_template else RENDERER_REFUSED
    for number, transition in enumerate(transitions):
        prompt, action = pack_ids(transition.ob.to_ints()), transition.ac
        check_lengths(len(action.tokens), len(action.maybe_logprobs or []))
        parent = prompts.find(prompt)
        messages, reply, fork_reason = list[dict[str, Any]](), dict[str, Any](content=""), None
        if exchanges is not None:
            messages, (reply,) = to_dicts(exchanges[number][0]), to_dicts([exchanges[number][1]])
            if parent is None:
                path = conversations.walk(messages, b"")
                continues = 0 < path.history_length < len(messages) and conversations.find(path)
                fork_reason = refusal if continues else conversations.fork_reason(path)
        turn = Turn(
            parent=parent,
            prompt=prompt,
            new_prompt=prompt[len(parent.stream()) :] if parent else prompt,
            fork_reason=fork_reason,
            new_messages=messages[parent.reply_index + 1 if parent else 0 :],
            tools=[],
            reply_index=len(messages),
        )
        node = Node(turn, uuid4().hex, pack_ids(action.tokens), reply)
        prompts.add(node)
        conversations.add(node)
        calls.append(
            Call(
                call_id=node.call_id,
                parent_id=parent and parent.call_id,
                new_prompt=node.new_prompt,
                sampled=node.sampled,
                logprobs=pack_logprobs(action.maybe_logprobs or []),
                stop_reason="length" if action.stop_reason == "length" else "stop",
                policy_version=policy_version,
                **(parameters[number] if parameters is not None else {}),
                fork_reason=fork_reason,
                messages=json.dumps(turn.new_messages),
                reply=json.dumps(reply if exchanges is not None else {}),
            )
        )
    return calls
