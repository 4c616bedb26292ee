"""One episode inside the eval: what its solver asks, who answers, and how it ends.

Invariant: a model call belongs to exactly one episode, found through a context variable that the solver's
context carries and the scorers' does not; a call without one is a scorer grading with the policy.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from anyio import CancelScope
from inspect_ai.log import EvalSample
from inspect_ai.model import ChatMessage, GenerateConfig, Model, ModelAPI, ModelOutput, get_model, modelapi
from inspect_ai.scorer import Score, Scorer, Target
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolChoice, ToolInfo
from inspect_ai.util import LimitExceededError

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.errors import EpisodeAbandonedError, SelfGradingError

UNLIMITED = 1_000_000
"""For Inspect's own concurrency limits: the caller decides how many episodes run at once."""


@dataclass(frozen=True)
class GenerateRequest:
    """One model call of an episode, as the solver made it."""

    messages: list[ChatMessage]
    tools: list[ToolInfo]
    tool_choice: ToolChoice
    config: GenerateConfig


class Policy(Protocol):
    """What answers the model calls of one episode. Calls overlap if the solver makes them so."""

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        """The answer to one call. What it raises goes through the solver; if that ends the episode,
        `TaskRunner.run` raises it again. `inspect_ai.util.LimitExceededError` ends the solver and lets
        the scorers run."""
        ...


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one episode ended."""

    sample_id: int | str
    scores: dict[str, Score]
    """By scorer name. Empty if the solver or a scorer raised."""

    error: str | None
    """What the solver or a scorer raised, or None."""

    limit: str | None
    """Type of the limit that ended the solver (`message`, `token`, `turn`, `time`, `custom`...), or None."""

    messages: list[ChatMessage]
    """The conversation at the end."""

    traceback: str = ""
    """Where the error came from; empty without one."""

    completion: str = ""
    """The text of the output that was scored."""

    record: EvalSample | None = field(default=None, repr=False, compare=False)
    """Inspect's own record of the episode."""

    @classmethod
    def of(cls, sample: EvalSample) -> EpisodeOutcome:
        """The outcome that Inspect reports."""
        return cls(
            sample_id=sample.id,
            scores=dict(sample.scores or {}),
            error=sample.error.message if sample.error else None,
            limit=sample.limit.type if sample.limit else None,
            messages=list(sample.messages),
            traceback=sample.error.traceback if sample.error else "",
            completion=sample.output.completion,
            record=sample,
        )


@dataclass(eq=False)
class Episode:
    """A `TaskRunner.run` in progress."""

    policy: Policy
    ended: asyncio.Future[EpisodeOutcome]
    calls: set[asyncio.Task[ModelOutput]] = field(default_factory=set["asyncio.Task[ModelOutput]"])
    failure: Exception | None = None
    """What the policy raised last. Raised to the caller if the episode then ended with an error."""

    self_graded: bool = False
    scoring: set[CancelScope] = field(default_factory=set[CancelScope])
    """The scorers that run."""

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        """Have the policy answer. Raises EpisodeAbandonedError from the moment the episode has ended."""
        if self.ended.done():
            raise EpisodeAbandonedError("the episode has ended; its model calls are refused")
        call = asyncio.create_task(_answer(self.policy, request))
        self.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if _is_cancelling():
                raise
            raise EpisodeAbandonedError("the episode was abandoned during a model call") from None
        except LimitExceededError:
            raise
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.calls.discard(call)

    def end(self, outcome: EpisodeOutcome) -> None:
        """Inspect is done with it. Does nothing if it was abandoned."""
        if self.ended.done():
            return
        if self.failure is not None and (self.self_graded or outcome.error is not None):
            self.ended.set_exception(self.failure)
        else:
            self.ended.set_result(outcome)

    def abandon(self, error: Exception | None = None) -> None:
        """End it without a score, with `error` if given: pending model calls fail, later ones are refused."""
        if not self.ended.done():
            if error is None:
                self.ended.cancel()
            else:
                self.ended.set_exception(error)
        for call in self.calls:
            call.cancel()
        for scope in self.scoring:
            scope.cancel()


Episodes = Mapping[int, Episode]
"""The running episodes by Inspect's epoch number, which is different for each."""

_CURRENT: ContextVar[Episode | None] = ContextVar("inspect_tinker_bridge_episode", default=None)


@solver
def bind_episode(episodes: Episodes) -> Solver:
    """A setup solver after which the model calls of this context belong to the sample's episode."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        episode = episodes.get(state.epoch)
        if episode is None:
            raise EpisodeAbandonedError("the episode was abandoned before it began")
        _CURRENT.set(episode)
        return state

    return solve


def cancellable(scorer: Scorer, episodes: Episodes) -> Scorer:
    """The same scorer, ending with its episode where that is abandoned: Inspect ends only the solver then."""

    @functools.wraps(scorer)  # its registration is in its attributes
    async def score(state: TaskState, target: Target) -> Score | None:
        episode = episodes.get(state.epoch)
        if episode is None:
            raise EpisodeAbandonedError("the episode was abandoned before it was scored")
        with CancelScope() as scope:
            episode.scoring.add(scope)
            try:
                return await scorer(state, target)
            finally:
                episode.scoring.discard(scope)
        raise EpisodeAbandonedError("the episode was abandoned while it was scored")

    return score


def policy_model(episodes: Episodes, *, allow_self_grading: bool = False) -> Model:
    """The model that Inspect sees: it hands each call to the policy of the episode that makes it."""
    # A name of its own: `generate(cache=True)` must not find what another run's policy said.
    model = get_model(f"tinkerbridge/policy-{uuid4().hex[:12]}", memoize=False)
    if not isinstance(model.api, _PolicyAPI):
        raise TypeError(f"another package registered the model API 'tinkerbridge': {type(model.api)}")
    model.api.episodes = episodes
    model.api.allow_self_grading = allow_self_grading
    return model


class _PolicyAPI(ModelAPI):
    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name, **options)
        self.episodes: Episodes = {}
        self.allow_self_grading = False

    def max_connections(self) -> int:
        return UNLIMITED

    def should_retry(self, ex: BaseException) -> bool:
        return False

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        episode = _CURRENT.get()
        if episode is None and self.allow_self_grading:
            episode = self.episodes.get(_inspect_private.active_epoch() or 0)
        if episode is None:
            raise self._refuse_self_grading()
        return await episode.generate(GenerateRequest(list(input), list(tools), tool_choice, config))

    def _refuse_self_grading(self) -> SelfGradingError:
        error = SelfGradingError()
        episode = self.episodes.get(_inspect_private.active_epoch() or 0)
        if episode is not None:
            episode.failure, episode.self_graded = error, True
        return error


@modelapi(name="tinkerbridge")
def _policy_api() -> type[ModelAPI]:  # pyright: ignore[reportUnusedFunction] (registered under its name)
    return _PolicyAPI


async def _answer(policy: Policy, request: GenerateRequest) -> ModelOutput:
    return await policy.generate(request)


def _is_cancelling() -> bool:
    """Whether the running task itself is being cancelled, rather than what it awaits."""
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
