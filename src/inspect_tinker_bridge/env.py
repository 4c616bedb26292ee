"""An Inspect episode turned inside out into a Tinker `Env`: the solver's `generate()` waits for `step`.

Invariants: each observation extends the previous one and its action unless labelled `fork`; a failure
raises TaskFailedError and is never a reward of 0; `cleanup` ends what the trainer left unfinished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import tinker
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ModelOutput
from inspect_ai.util import LimitExceededError
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    RLDataset,
    StepResult,
    StopReason,
    Trajectory,
)

from inspect_tinker_bridge.episodes import EpisodeOutcome, GenerateRequest
from inspect_tinker_bridge.errors import ConversionError, TaskFailedError
from inspect_tinker_bridge.messages import to_model_output, to_renderer_message, to_renderer_messages
from inspect_tinker_bridge.pool import shared_pool
from inspect_tinker_bridge.runner import TaskRunner
from inspect_tinker_bridge.scoring import score_episode
from inspect_tinker_bridge.tasks import InspectTaskInfo
from inspect_tinker_bridge.token_buffer import Prompt, TokenBuffer

EnvType = Literal["single_turn", "task"]
"""`single_turn`: one action, then the score. `task`: the task's own solver decides, up to `max_turns`."""

_STOPS = {
    "message": StopReason.MAX_TURNS,
    "turn": StopReason.MAX_TURNS,
    "custom": StopReason.MAX_TURNS,
    "token": StopReason.MAX_TOKENS,
    "context": StopReason.CONTEXT_OVERFLOW,
    "time": StopReason.ROLLOUT_TIMEOUT,
    "working": StopReason.ROLLOUT_TIMEOUT,
}
"""Tinker's stop reason for each limit of Inspect; another limit keeps its own name."""


@dataclass(frozen=True)
class EnvOptions:
    """What every environment of a dataset has in common."""

    env_type: EnvType = "single_turn"
    max_turns: int = 10
    """Actions of one `task` episode; the next model call ends the solver, and the episode is scored."""

    scorer_weights: Mapping[str, float] | None = None
    """Weight of each scorer by name; equal if None."""

    model_roles: Mapping[str, str | Model] | None = None
    """Inspect model roles, such as the grader of model-graded scorers."""


@dataclass(frozen=True)
class _Call:
    request: GenerateRequest
    reply: asyncio.Future[ModelOutput]


class _Turnstile:
    """The policy that the solver sees: each model call waits in line until the environment answers it."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._limit: LimitExceededError | None = None
        self._waiting: set[asyncio.Future[ModelOutput]] = set()

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        if self._limit is not None:
            raise self._limit
        reply: asyncio.Future[ModelOutput] = asyncio.get_running_loop().create_future()
        self._waiting.add(reply)
        try:
            await self.calls.put(_Call(request, reply))
            return await reply
        finally:
            self._waiting.discard(reply)

    def finish(self, limit: LimitExceededError) -> None:
        """End the solver, at this call or its next one; the scorers still run."""
        self._limit = limit
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(limit)


class InspectEnv(Env):
    """One episode of one sample. Single use; starts at `initial_observation`.

    Metrics of a step: `fork` is 1 if the next observation does not extend this one and its action. Of the
    last step: `stop/<reason>`, `turns`, `score/<scorer>` and, if the solver no longer waited for the action
    (a limit of the task ended it first), `action_unseen`.
    """

    def __init__(
        self, runner: TaskRunner, sample: Sample, renderer: Renderer, options: EnvOptions | None = None
    ) -> None:
        self._runner = runner
        self._sample = sample
        self._renderer = renderer
        self._options = options or EnvOptions()
        self._buffer = TokenBuffer(renderer)
        self._turnstile = _Turnstile()
        self._episode: asyncio.Task[EpisodeOutcome] | None = None
        self._call: _Call | None = None
        self._prompt = Prompt([], False)
        self._turns = 0
        self._rewarded = False

    async def initial_observation(
        self,
    ) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        """Start the episode: the prompt of its first model call (token ids) and what ends an action.

        A solver that ends without a model call is scored, and reported as an episode without an action.
        Raises TaskFailedError if the solver or a scorer raises, and RunnerError.
        """
        self._episode = asyncio.create_task(self._runner.run(self._sample, self._turnstile))
        outcome = await self._advance()
        if outcome is None:
            return self._observation()
        reward, metrics = self._reward(outcome)
        return InitialObservationOverflow(reward=reward, metrics={**metrics, "no_generate": 1.0})

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Give the action (sampled token ids) to the solver and wait for its next model call or its end.

        Raises TaskFailedError if the solver or a scorer raises, or a `single_turn` episode calls twice.
        """
        if self._call is None:
            raise TaskFailedError(self._id, "step() needs an observation first, and none after the last step")
        unseen = self._answer(self._call, action, truncated=(extra or {}).get("stop_reason") == "length")
        outcome = await self._advance()
        if outcome is not None:
            reward, metrics = self._reward(outcome)
            metrics["action_unseen"] = float(unseen)
            return StepResult(reward, True, tinker.ModelInput.empty(), [], metrics=metrics)
        observation, stop = self._observation()
        return StepResult(0.0, False, observation, stop, metrics={"fork": float(self._prompt.is_fork)})

    async def finish(self) -> tuple[float, Metrics]:
        """End the solver where it stands and score: for an episode that the trainer stopped early.

        The reward that no step has given yet: 0 if the last step gave it.
        """
        if self._rewarded or self._episode is None:
            return 0.0, {}
        self._turnstile.finish(LimitExceededError("operator", value=self._turns, limit=self._turns))
        await asyncio.wait({self._episode})
        return self._reward(self._episode.result())

    async def abandon(self) -> None:
        """End the episode without a score. Idempotent; never raises what the episode raised."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait({self._episode})
            if not self._episode.cancelled():
                self._episode.exception()  # seen here, so that asyncio does not report it as forgotten

    @property
    def _id(self) -> int | str:
        return self._sample.id if self._sample.id is not None else ""

    async def _advance(self) -> EpisodeOutcome | None:
        """Wait for the next model call (then `self._call` and `self._prompt` are its) or for the outcome."""
        self._call = None
        while (call := await self._next_call()) is not None:
            if self._turns == self._allowed_turns:
                self._refuse(call)
            elif not call.reply.done():
                self._call, self._prompt = call, self._render(call.request)
                return None
        if self._episode is None:
            raise TaskFailedError(self._id, "the episode was not started")
        return self._episode.result()

    async def _next_call(self) -> _Call | None:
        """The next model call, or None once the episode has ended."""
        if self._episode is None or self._episode.done():
            return None
        waiting = asyncio.create_task(self._turnstile.calls.get())
        try:
            await asyncio.wait({waiting, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            got = waiting.result() if waiting.done() else None
            waiting.cancel()
        return got

    @property
    def _allowed_turns(self) -> int:
        return 1 if self._options.env_type == "single_turn" else self._options.max_turns

    def _refuse(self, call: _Call) -> None:
        limit = self._allowed_turns
        if self._options.env_type == "single_turn":
            reason = (
                "its solver called the model a second time, and env_type='single_turn' has one action; "
                "use env_type='task'"
            )
            call.reply.set_exception(TaskFailedError(self._id, reason))
            return
        self._turnstile.finish(
            LimitExceededError("custom", value=limit + 1, limit=limit, message="max_turns")
        )

    def _render(self, request: GenerateRequest) -> Prompt:
        if (request.config.num_choices or 1) != 1:
            raise ConversionError(
                f"the task asks for {request.config.num_choices} choices; one action is one"
            )
        messages = to_renderer_messages(self._renderer, request.messages, request.tools, request.tool_choice)
        return self._buffer.ask(messages)

    def _observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        config = self._call.request.config if self._call else GenerateConfig()
        return tinker.ModelInput.from_ints(self._prompt.ids), _stop_condition(self._renderer, config)

    def _answer(self, call: _Call, action: list[int], *, truncated: bool) -> bool:
        """Give the solver its answer; whether it had gone already."""
        parsed, _ = self._renderer.parse_response(action)
        output = to_model_output(
            parsed, prompt_tokens=len(self._prompt.ids), sampled_tokens=len(action), truncated=truncated
        )
        self._buffer.answer(action, to_renderer_message(output.message))
        self._turns += 1
        unseen = call.reply.done()
        if not unseen:
            call.reply.set_result(output)
        return unseen

    def _reward(self, outcome: EpisodeOutcome) -> tuple[float, Metrics]:
        scored = score_episode(outcome, self._options.scorer_weights)
        self._rewarded = True
        stop = _STOPS.get(outcome.limit, outcome.limit) if outcome.limit else StopReason.COMPLETED
        metrics: Metrics = {f"score/{name}": value for name, value in scored.values.items()}
        return scored.reward, {**metrics, f"stop/{stop}": 1.0, "turns": float(self._turns)}


def _stop_condition(renderer: Renderer, config: GenerateConfig) -> StopCondition:
    stops = renderer.get_stop_sequences()
    if not config.stop_seqs:
        return stops
    texts = [stop for stop in stops if isinstance(stop, str)]
    if len(texts) != len(stops):
        raise ConversionError(
            f"the task stops at {config.stop_seqs}, and the renderer {type(renderer).__name__} at token ids; "
            "Tinker takes one kind: remove stop_seqs from the task's GenerateConfig"
        )
    return [*texts, *config.stop_seqs]


@dataclass
class InspectEnvGroupBuilder(EnvGroupBuilder):
    """The group of one sample: `num_envs` episodes that are compared with each other.

    Pickles; the process that unpickles it loads the task once. Single use.
    """

    task: InspectTaskInfo
    sample: Sample
    renderer: Renderer
    num_envs: int
    options: EnvOptions = field(default_factory=EnvOptions)
    _runner: TaskRunner | None = field(default=None, init=False, repr=False)
    _envs: list[InspectEnv] = field(default_factory=list["InspectEnv"], init=False, repr=False)

    async def make_envs(self) -> Sequence[Env]:
        """`num_envs` environments that have not started. Waits while another task's runner is in use."""
        if self._runner is None:
            self._runner = await shared_pool().acquire(self.task, self.options.model_roles)
        made = [
            InspectEnv(self._runner, self.sample, self.renderer, self.options) for _ in range(self.num_envs)
        ]
        self._envs.extend(made)
        return made

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Score what the trainer stopped early; the other episodes have their reward in the last step."""
        envs = [env for env in env_group if isinstance(env, InspectEnv)]
        if len(envs) != len(trajectory_group):
            raise ConversionError(f"{len(trajectory_group)} trajectories, {len(envs)} Inspect environments")
        return list(await asyncio.gather(*(env.finish() for env in envs)))

    async def cleanup(self) -> None:
        """End what still runs and give the runner back. Idempotent."""
        envs, self._envs = self._envs, []
        runner, self._runner = self._runner, None
        try:
            await asyncio.gather(*(env.abandon() for env in envs))
        finally:
            if runner is not None:
                await shared_pool().release()

    def logging_tags(self) -> list[str]:
        """The task's name, without its package."""
        return [self.task.name.rpartition("/")[2]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None, "_envs": []}


class InspectRLDataset(RLDataset):
    """A task's samples in batches of groups, in the dataset's order; the last batch may be smaller."""

    def __init__(self, builder: InspectEnvGroupBuilder, samples: Sequence[Sample], batch_size: int) -> None:
        self._builder = builder
        self._samples = list(samples)
        self._batch_size = batch_size

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples, one group each."""
        return self._samples

    @property
    def task(self) -> InspectTaskInfo:
        """The task that the samples are of."""
        return self._builder.task

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """New group builders of one batch. Raises IndexError outside `0 <= index < len(self)`."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self._batch_size
        return [
            replace(self._builder, sample=sample)
            for sample in self._samples[start : start + self._batch_size]
        ]

    def __len__(self) -> int:
        return -(-len(self._samples) // self._batch_size)
