"""Tinker environments of Inspect tasks: `InspectEnv`, groups, and datasets of groups.

A dataset's batches depend only on its options, so a resumed run gets the same ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import tinker
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import ChatMessage, GenerateConfig
from inspect_ai.util import LimitExceededError
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Logs,
    Metrics,
    RLDataset,
    StepResult,
    StopReason,
    Trajectory,
)

from inspect_tinker_bridge.conversion import check_for_tinker
from inspect_tinker_bridge.episodes import EpisodeOutcome, GenerateRequest, PendingCall, PendingCalls
from inspect_tinker_bridge.errors import (
    EnvironmentConfigError,
    TaskFailedError,
    UnsupportedError,
    require_counts,
)
from inspect_tinker_bridge.pool import shared_pool
from inspect_tinker_bridge.rendering import (
    ParsedAction,
    Prompt,
    TokenBuffer,
    offered_tools,
    parse_action,
    to_model_output,
    to_renderer_message,
    to_renderer_messages,
)
from inspect_tinker_bridge.runner import RunnerOptions, TaskRunner
from inspect_tinker_bridge.scoring import EpisodeReward, score_episode
from inspect_tinker_bridge.tasks import InspectTaskInfo

__all__ = ["EnvOptions", "EnvType", "InspectEnv", "InspectEnvGroupBuilder", "InspectRLDataset"]

logger = logging.getLogger(__name__)

EnvType = Literal["single_turn", "multi_turn", "task"]
"""`single_turn` takes one action, `multi_turn` adds an agent, `task` runs the task's solver."""

# Other limits keep Inspect's names.
_STOPS = {
    "message": StopReason.MAX_TURNS,
    "turn": StopReason.MAX_TURNS,
    "custom": StopReason.MAX_TURNS,
    "token": StopReason.MAX_TOKENS,
    "context": StopReason.CONTEXT_OVERFLOW,
    "time": StopReason.ROLLOUT_TIMEOUT,
    "working": StopReason.ROLLOUT_TIMEOUT,
}


@dataclass(frozen=True)
class EnvOptions:
    """Pickled, so functions must be importable."""

    env_type: EnvType = "single_turn"
    max_turns: int = 10
    """Limits the actions unless `single_turn`. A further call ends and scores the episode."""

    scorer_weights: Mapping[str, float] | None = None
    """By scorer name. None: equal weights."""

    runner: RunnerOptions = field(default_factory=RunnerOptions)
    applied: frozenset[str] = frozenset()
    """Fields of `InspectEnv.generate_config` that the caller applies, without a warning."""

    def __post_init__(self) -> None:
        if self.env_type not in get_args(EnvType):
            raise EnvironmentConfigError(
                f"env_type is {self.env_type!r}; it must be one of {', '.join(get_args(EnvType))}"
            )
        require_counts(max_turns=self.max_turns)


class InspectEnv(Env):
    """One episode. It answers the solver's model calls one `step` at a time.

    Metrics of a step: `fork` is 1 if the next observation does not extend this one and its action. Metrics of
    the last step: `stop/<reason>`, `turns`, `score/<scorer>`, `correct` (1 for full marks), `format_valid` (1
    if every action ended properly and its tool calls parsed), and `action_unseen` (1 if a limit ended the
    solver before it got the action).
    """

    def __init__(
        self,
        runner: TaskRunner,
        sample: Sample,
        renderer: Renderer,
        options: EnvOptions | None = None,
        *,
        task: InspectTaskInfo | None = None,
    ) -> None:
        """`task` is required if the runner has several tasks, `options.runner` if a task has several
        options."""
        self._runner = runner
        self._task = task
        self._sample = sample
        self._renderer = renderer
        self._options = options or EnvOptions()
        self._buffer = TokenBuffer(renderer)
        self._pending = PendingCalls(self._count_text_tokens, self._end_solver)
        self._episode: asyncio.Task[EpisodeOutcome] | None = None
        self._call: PendingCall | None = None
        self._prompt = Prompt([], False)
        self._turns = 0
        self._format_valid = True
        self._rewarded = False
        self.outcome: EpisodeOutcome | None = None
        self.exchanges: list[tuple[list[ChatMessage], ChatMessage]] = []

        self.unapplied: set[str] = set()  # Settings that the trainer decides, as `name=value`.
        self.scored: EpisodeReward | None = None
        self.record: EvalSample | None = None
        """Inspect's record, also after a failure; None before the end."""

    async def initial_observation(
        self,
    ) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        """Start the episode. Returns its first prompt (token ids) and the stop condition.

        Raises TaskFailedError if the solver or a scorer raises, and RunnerError.
        """
        run = self._runner.run(
            self._sample,
            self._pending,
            task=self._task,
            options=self._options.runner,
            on_record=self._keep_record,
        )
        self._episode = asyncio.create_task(run)
        outcome = await self._advance()
        if outcome is None:
            return self._observation()
        scored = await self._score(outcome)
        return InitialObservationOverflow(
            reward=scored.reward,
            metrics={**self._metrics(outcome, scored), "no_generate": 1.0},
            logs=_logs(outcome),
        )

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Pass the action (sampled token ids) to the solver, and wait for its next model call or its end.

        Raises TaskFailedError if the solver or a scorer raises.
        """
        if self._call is None:
            raise TaskFailedError(self._id, "step() before initial_observation() or after the last step")
        truncated = (extra or {}).get("stop_reason") == "length"
        unseen = self._answer(self._call, action, truncated=truncated)
        outcome = await self._advance()
        if outcome is None:
            observation, stop = self._observation()
            return StepResult(0.0, False, observation, stop, metrics={"fork": float(self._prompt.is_fork)})
        scored = await self._score(outcome)
        metrics = {**self._metrics(outcome, scored), "action_unseen": float(unseen)}
        nothing = tinker.ModelInput.empty()
        return StepResult(scored.reward, True, nothing, [], metrics=metrics, logs=_logs(outcome))

    async def finish(self) -> tuple[float, Metrics]:
        """Score an episode that the trainer stopped early.

        Returns the reward, or 0 if a step has returned it, and the metrics without `stop/`. Raises
        TaskFailedError if the episode never started, or if the solver or a scorer raises.
        """
        if self._rewarded:
            return 0.0, {}
        if self._episode is None:
            raise TaskFailedError(self._id, "it was stopped before it started")
        self._pending.finish(LimitExceededError("operator", value=self._turns, limit=self._turns))
        self._end_solver()
        await asyncio.wait({self._episode})
        outcome = self._episode.result()
        scored = await self._score(outcome)
        metrics = self._metrics(outcome, scored)
        return scored.reward, {name: value for name, value in metrics.items() if not name.startswith("stop/")}

    async def abandon(self) -> None:
        """End the episode without a score. Never raises. Idempotent."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait({self._episode})
            if not self._episode.cancelled():
                self._episode.exception()  # Else asyncio logs it.

    def _keep_record(self, record: EvalSample) -> None:
        self.record = record

    def _end_solver(self) -> None:
        self._runner.finish(self._pending)

    def _count_text_tokens(self, text: str) -> int:
        return len(self._renderer.tokenizer.encode(text, add_special_tokens=False))

    @property
    def _id(self) -> int | str:
        return self._sample.id if self._sample.id is not None else ""

    async def _advance(self) -> EpisodeOutcome | None:
        self._call = None
        if self._episode is None:
            raise TaskFailedError(self._id, "the episode was not started")
        while (call := await self._pending.next_call(self._episode)) is not None:
            if self._turns == self._allowed_turns:
                self._refuse()
            elif not call.reply.done():
                self._call, self._prompt = call, self._render(call.request)
                return None
        return self._episode.result()

    @property
    def _allowed_turns(self) -> int:
        return 1 if self._options.env_type == "single_turn" else self._options.max_turns

    def _refuse(self) -> None:
        limit = self._allowed_turns
        self._pending.finish(LimitExceededError("custom", value=limit + 1, limit=limit, message="max_turns"))

    def _render(self, request: GenerateRequest) -> Prompt:
        fields = check_for_tinker(request.config, applied=self._options.applied)
        self.unapplied.update(fields)
        _warn_of_unapplied(self._task or self._runner.task, fields)
        messages = to_renderer_messages(self._renderer, request.messages, request.tools, request.tool_choice)
        return self._buffer.render(messages)

    @property
    def generate_config(self) -> GenerateConfig:
        """The pending call's settings, including the task's config."""
        return self._call.request.config if self._call else GenerateConfig()

    def _observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return self._prompt.model_input, _stop_condition(self._renderer, self.generate_config)

    def _answer(self, call: PendingCall, action: list[int], *, truncated: bool) -> bool:
        parsed = self._parse(call.request, action)
        self._format_valid &= parsed.is_well_formed
        output = to_model_output(
            parsed.message,
            prompt_tokens=self._prompt.length,
            sampled_tokens=len(action),
            truncated=truncated,
        )
        self.exchanges.append((call.request.messages, output.message))
        self._buffer.record(action, to_renderer_message(self._renderer, output.message))
        self._turns += 1
        unseen = call.reply.done()
        if not unseen:
            call.reply.set_result(output)
        return unseen

    def _parse(self, request: GenerateRequest, action: list[int]) -> ParsedAction:
        tools = offered_tools(request.tools, request.tool_choice)
        return parse_action(self._renderer, action, tools, stop_texts=request.config.stop_seqs or ())

    async def _score(self, outcome: EpisodeOutcome) -> EpisodeReward:
        self.outcome = outcome
        scored = score_episode(outcome, self._options.scorer_weights)
        self._rewarded = True
        self.scored = scored
        return scored

    def _metrics(self, outcome: EpisodeOutcome, scored: EpisodeReward) -> Metrics:
        stop = _STOPS.get(outcome.limit, outcome.limit) if outcome.limit else StopReason.COMPLETED
        metrics: Metrics = {f"score/{name}": value for name, value in scored.values.items()}
        metrics |= {"correct": float(scored.correct), "format_valid": float(self._format_valid)}
        return {**metrics, f"stop/{stop}": 1.0, "turns": float(self._turns)}


@dataclass
class InspectEnvGroupBuilder(EnvGroupBuilder):
    """Makes one sample's group of `num_envs` episodes, once."""

    task: InspectTaskInfo
    sample: Sample
    renderer: Renderer
    num_envs: int
    options: EnvOptions = field(default_factory=EnvOptions)
    _runner: TaskRunner | None = field(default=None, init=False, repr=False)
    _envs: list[InspectEnv] = field(default_factory=list["InspectEnv"], init=False, repr=False)

    def __post_init__(self) -> None:
        require_counts(num_envs_per_group=self.num_envs)

    async def make_envs(self) -> Sequence[Env]:
        """Waits while another event loop runs episodes."""
        if self._runner is None:
            self._runner = await shared_pool().acquire(self.task, self.options.runner)
        made = [
            InspectEnv(self._runner, self.sample, self.renderer, self.options, task=self.task)
            for _ in range(self.num_envs)
        ]
        self._envs.extend(made)
        return made

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Score the episodes that the trainer stopped early."""
        envs = [env for env in env_group if isinstance(env, InspectEnv)]
        if len(envs) != len(trajectory_group):
            raise UnsupportedError(f"{len(trajectory_group)} trajectories, {len(envs)} Inspect environments")
        return list(await asyncio.gather(*(env.finish() for env in envs)))

    async def cleanup(self) -> None:
        """End running episodes and release the runner. Never raises. Idempotent."""
        envs, self._envs = self._envs, []
        runner, self._runner = self._runner, None
        try:
            await asyncio.gather(*(env.abandon() for env in envs))
        finally:
            if runner is not None:
                await self._release()

    async def _release(self) -> None:
        try:
            await shared_pool().release()
        except Exception:
            logger.exception("the eval of the task %r did not close", self.task.name)

    def logging_tags(self) -> list[str]:
        return [self.task.name.rpartition("/")[2]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None, "_envs": []}


class InspectRLDataset(RLDataset):
    """A task's samples in batches of groups; the last may be smaller.

    Epochs follow without a gap, each in the dataset's order or shuffled anew.
    """

    def __init__(
        self,
        builder: InspectEnvGroupBuilder,
        samples: Sequence[Sample],
        batch_size: int,
        *,
        num_epochs: int = 1,
        shuffle: bool = False,
        shuffle_seed: int | None = 0,
    ) -> None:
        """`builder` is every group's template, `batch_size` counts samples.

        With `shuffle_seed=None` a seed is drawn. Raises EnvironmentConfigError for counts below 1.
        """
        require_counts(batch_size=batch_size, num_epochs=num_epochs)
        self._builder = builder
        self._samples = list(samples)
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        drawn = random.randrange(2**32) if shuffle_seed is None else shuffle_seed
        self._seed = drawn if shuffle else None
        self._orders: dict[int, list[int]] = {}

    @property
    def samples(self) -> Sequence[Sample]:
        return self._samples

    @property
    def task(self) -> InspectTaskInfo:
        return self._builder.task

    @property
    def shuffle_seed(self) -> int | None:
        return self._seed

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self._batch_size
        end = min(start + self._batch_size, len(self._samples) * self._num_epochs)
        return [replace(self._builder, sample=self._sample_at(position)) for position in range(start, end)]

    def __len__(self) -> int:
        return -(-len(self._samples) * self._num_epochs // self._batch_size)

    def split(
        self, test_samples: int, *, seed: int = 0, num_envs_per_group: int = 1
    ) -> tuple[InspectRLDataset, InspectRLDataset]:
        """Split off a test set: one epoch of `test_samples` samples drawn with `seed`.

        `num_envs_per_group` is for the test set. Raises EnvironmentConfigError for an empty part.
        """
        require_counts(test_samples=test_samples)
        if not test_samples < len(self._samples):
            raise EnvironmentConfigError(
                f"test_samples is {test_samples!r}; it must split {len(self._samples)} samples into two parts"
            )
        held_out = set(random.Random(seed).sample(range(len(self._samples)), test_samples))
        parts: tuple[list[Sample], list[Sample]] = ([], [])
        for position, sample in enumerate(self._samples):
            parts[position in held_out].append(sample)
        train = InspectRLDataset(
            self._builder,
            parts[0],
            self._batch_size,
            num_epochs=self._num_epochs,
            shuffle=self._seed is not None,
            shuffle_seed=self._seed or 0,
        )
        builder = replace(self._builder, num_envs=num_envs_per_group)
        return train, InspectRLDataset(builder, parts[1], self._batch_size)

    def _sample_at(self, position: int) -> Sample:
        epoch, at = divmod(position, len(self._samples))
        if self._seed is None:
            return self._samples[at]
        if epoch not in self._orders:
            order = list(range(len(self._samples)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order, **{e: o for e, o in self._orders.items() if e == epoch - 1}}
        return self._samples[self._orders[epoch][at]]


def _logs(outcome: EpisodeOutcome) -> Logs:
    logs: Logs = {}
    for name, score in outcome.scores.items():
        texts = {"answer": score.answer, "explanation": score.explanation}
        for key, text in texts.items():
            if text is not None:
                logs[f"{key}/{name}"] = text.encode("utf-8", "replace").decode()
    return logs


def _warn_of_unapplied(task: InspectTaskInfo, fields: Sequence[str]) -> None:
    if fields and (task.name, *fields) not in _WARNED:
        _WARNED.add((task.name, *fields))
        logger.warning(
            "the task %r asks for %s; in a Tinker environment the trainer decides how to sample",
            *(task.name, ", ".join(fields)),
        )


_WARNED: set[tuple[str, ...]] = set()


def _stop_condition(renderer: Renderer, config: GenerateConfig) -> StopCondition:
    # Tinker takes one kind of stops, so ids become text.
    stops = renderer.get_stop_sequences()
    if not config.stop_seqs:
        return stops
    texts = [stop if isinstance(stop, str) else str(renderer.tokenizer.decode([stop])) for stop in stops]
    return [*texts, *config.stop_seqs]
