"""Episodes inside an eval: their model calls, the policies that answer them, and their outcomes.

A context variable names the episode of a model call; without one, the call comes from a scorer that grades
with the policy. `next_call` takes every call that `PendingCalls.generate` accepts, or the call fails with the
limit of `finish`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from traceback import format_exception, format_exception_only
from typing import Any, Protocol, cast
from uuid import uuid4

from anyio import CancelScope
from inspect_ai.log import EvalSample
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelCost,
    ModelInfo,
    ModelOutput,
    get_model,
    get_model_info,
    modelapi,
    set_model_info,
)
from inspect_ai.scorer import Score, Scorer, Target
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver
from inspect_ai.tool import ToolChoice, ToolInfo
from inspect_ai.util import LimitExceededError

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.conversion import LEFT_OUT
from inspect_tinker_bridge.errors import (
    BridgeError,
    EpisodeAbandonedError,
    EpisodeError,
    RunnerError,
    SandboxError,
    SelfGradingError,
)

MODEL_NAME = "tinkerbridge/policy"
UNLIMITED = 1_000_000  # Callers limit the episodes.


@dataclass(frozen=True)
class GenerateRequest:
    messages: list[ChatMessage]
    tools: list[ToolInfo]
    tool_choice: ToolChoice
    config: GenerateConfig
    role: str = ""
    """Empty for the policy."""


class ChatPolicy(Protocol):
    """Answers the model calls of one episode, which may overlap.

    It may have a method `count_text_tokens(text) -> int`; by default, three bytes of UTF-8 are a token.
    """

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        """Answer one call.

        An exception ends the episode, and `TaskRunner.run` raises it, except that
        `inspect_ai.util.LimitExceededError` ends the solver and lets the scorers run.
        """
        ...


@dataclass(frozen=True)
class EpisodeOutcome:
    sample_id: int | str
    scores: dict[str, Score]
    """By scorer name; empty after an error."""

    error: str | None
    """The solver's or a scorer's exception."""

    limit: str | None
    """The limit that ended the solver, such as `message`."""

    messages: list[ChatMessage]
    traceback: str = ""
    completion: str = ""

    record: EvalSample | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, sample: EvalSample) -> EpisodeOutcome:
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
class RunningEpisode:
    policy: ChatPolicy
    ended: asyncio.Future[EpisodeOutcome]
    calls: set[asyncio.Task[ModelOutput]] = field(default_factory=set["asyncio.Task[ModelOutput]"])
    # The policy's last exception, raised after an error.
    failure: Exception | None = None
    scorer_error: Exception | None = None  # Inspect drops it once the trainer stopped the episode.
    is_finishing: bool = False  # Ends the solver, even before it begins.
    self_graded: bool = False
    scoring: set[CancelScope] = field(default_factory=set[CancelScope])
    on_record: Callable[[EvalSample], None] = lambda record: None

    async def generate(self, request: GenerateRequest) -> ModelOutput:
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
        if self.ended.done():
            return
        if outcome.record is not None:
            self.on_record(outcome.record)
        if outcome.error is None and self.scorer_error is not None:
            error = self.scorer_error
            told = "".join(format_exception(error))
            outcome = replace(outcome, error=str(error) or type(error).__name__, traceback=told)
        if self.failure is not None and (self.self_graded or outcome.error is not None):
            self.ended.set_exception(self.failure)
        else:
            self.ended.set_result(outcome)

    def abandon(self, error: Exception | None = None) -> None:
        """End without a score. Pending calls fail with `error` if given; later ones are refused."""
        if not self.ended.done():
            if error is None:
                self.ended.cancel()
            else:
                self.ended.set_exception(error)
        for call in self.calls:
            call.cancel()
        for scope in self.scoring:
            scope.cancel()


@dataclass(frozen=True)
class PendingCall:
    request: GenerateRequest
    reply: asyncio.Future[ModelOutput]


class PendingCalls:
    def __init__(
        self,
        count_text_tokens: Callable[[str], int] | None = None,
        on_ignored_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self.calls: asyncio.Queue[PendingCall] = asyncio.Queue()
        self.count_text_tokens = count_text_tokens or estimated_tokens
        self._on_ignored_limit = on_ignored_limit
        self._limit: LimitExceededError | None = None
        self._waiting: set[asyncio.Future[ModelOutput]] = set()

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        if self._limit is not None:
            self._on_ignored_limit()
            raise self._limit
        reply: asyncio.Future[ModelOutput] = asyncio.get_running_loop().create_future()
        self._waiting.add(reply)
        try:
            await self.calls.put(PendingCall(request, reply))
            return await reply
        finally:
            self._waiting.discard(reply)

    def finish(self, limit: LimitExceededError) -> None:
        """End the solver at its pending or next call; the scorers still run."""
        self._limit = limit
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(limit)

    async def next_call(self, episode: asyncio.Future[Any]) -> PendingCall | None:
        if episode.done():
            return None
        waiter = asyncio.ensure_future(self.calls.get())
        try:
            await asyncio.wait({waiter, episode}, return_when=asyncio.FIRST_COMPLETED)
            return waiter.result() if waiter.done() else None
        finally:
            waiter.cancel()


Episodes = Mapping[int, RunningEpisode]  # Keyed by Inspect's epoch numbers, which are unique.
_CURRENT: ContextVar[RunningEpisode | None] = ContextVar("inspect_tinker_bridge_episode", default=None)


def current_policy() -> ChatPolicy:
    episode = _CURRENT.get()
    if episode is None:
        raise RunnerError("no episode runs in this context")
    return episode.policy


@solver
def bind_episode(episodes: Episodes) -> Solver:
    """Assigns its context's model calls to the sample's episode."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        episode = episodes.get(state.epoch)
        if episode is None:
            raise EpisodeAbandonedError("the episode was abandoned before it began")
        if episode.is_finishing:
            raise LimitExceededError("operator", value=0, limit=0)
        _CURRENT.set(episode)
        return state

    return solve


def guarded(own: Solver) -> Solver:
    """Make a solver's exceptions fail only its episode."""
    if isinstance(own, Sequence):
        return chain([guarded(each) for each in cast("Sequence[Solver]", own)])

    @functools.wraps(own)  # Keeps the attributes that register it.
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        try:
            return await own(state, generate)
        except BaseException as error:
            if (told := reportable(error)) is error:
                raise
            raise told from None

    return solve


def reportable(error: BaseException) -> BaseException:
    """`error`, or a replacement that does not end the whole eval.

    Inspect fails on errors that are not an Exception, and on messages that UTF-8 cannot encode (`"\\ud800"`).
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return error
    if isinstance(error, asyncio.CancelledError) and _is_cancelling():
        return error
    told = "".join(format_exception(error))
    try:
        f"{told}{error}{error!r}".encode()
    except Exception:  # noqa: BLE001 - an error's own methods may raise anything
        is_clean = False
    else:
        is_clean = isinstance(error, Exception)
    if is_clean:
        return error
    return EpisodeError("".join(format_exception_only(error)).strip().encode(errors="replace").decode())


def cancellable(scorer: Scorer, episodes: Episodes) -> Scorer:
    """Make a scorer end with its abandoned episode. Inspect would only end the solver.

    Raises if the container is gone, because then correct commands failed too.
    """

    @functools.wraps(scorer)
    async def score(state: TaskState, target: Target) -> Score | None:
        episode = episodes.get(state.epoch)
        if episode is None:
            raise EpisodeAbandonedError("the episode was abandoned before it was scored")
        with CancelScope() as scope:
            episode.scoring.add(scope)
            try:
                scored = await scorer(state, target)
                if gone := await _inspect_private.dead_container():
                    raise SandboxError(f"the sandbox's container was lost during the episode: {gone}")
                return scored
            except BaseException as error:
                if isinstance(told := reportable(error), Exception):
                    episode.scorer_error = told
                if told is error:
                    raise
                raise told from None
            finally:
                episode.scoring.discard(scope)
        raise EpisodeAbandonedError("the episode was abandoned while it was scored")

    return score


def policy_model(episodes: Episodes, *, allow_self_grading: bool = False) -> Model:
    _price_policy()
    return _made(MODEL_NAME, episodes, allow_self_grading=allow_self_grading)


def role_model(episodes: Episodes, role: str) -> Model:
    return _made(f"{MODEL_NAME}-{role}", episodes, allow_self_grading=True, role=role)


def _made(name: str, episodes: Episodes, *, allow_self_grading: bool, role: str = "") -> Model:
    # Or `generate(cache=True)` could return another policy's reply.
    made = get_model(f"{name}-{uuid4().hex[:12]}", memoize=False)
    if not isinstance(made.api, _PolicyAPI):
        raise TypeError(f"another package registered the model API 'tinkerbridge': {type(made.api)}")
    made.api.episodes, made.api.allow_self_grading, made.api.role = episodes, allow_self_grading, role
    return _UntimedModel(made.api, made.config)


class _UntimedModel(Model):
    """Ignores the timeouts, retries and delays of any GenerateConfig.

    `attempt_timeout` would discard a finished reply. The public API merges configs before we could drop
    these.
    """

    def _resolve_config(self, config: GenerateConfig | None) -> GenerateConfig:
        resolved = super()._resolve_config(config)
        return resolved.model_copy(update=dict.fromkeys(_CONNECTION_FIELDS))


# A policy has no connection.
_CONNECTION_FIELDS = (
    "attempt_timeout",
    "stream_idle_timeout",
    "timeout",
    "max_retries",
    "max_connections",
    "adaptive_connections",
    "batch",
)


class TuningLeftOut(Model):
    """Drops `conversion.unapplied` fields, which servers refuse."""

    def _resolve_config(self, config: GenerateConfig | None) -> GenerateConfig:
        return super()._resolve_config(config).model_copy(update=dict.fromkeys(LEFT_OUT))


@functools.cache
def refusing_model(role: str) -> Model:
    model = get_model(f"{MODEL_NAME}-without-{role}", memoize=False)
    if isinstance(model.api, _PolicyAPI):
        model.api.instead_of = role
    return model


def _price_policy() -> None:
    # Tasks with a `cost_limit` need a price.
    known = get_model_info(MODEL_NAME) or ModelInfo()
    if known.cost is None:
        free = ModelCost(input=0, output=0, input_cache_write=0, input_cache_read=0)
        set_model_info(MODEL_NAME, known.model_copy(update={"cost": free}))


def estimated_tokens(text: str) -> int:
    # This estimate is rather too high.
    return max(1, len(text.encode(errors="replace")) // 3)


class _PolicyAPI(ModelAPI):
    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name, **options)
        self.episodes: Episodes = {}
        self.allow_self_grading = False
        self.role = ""
        self.instead_of: str | None = None  # The role that it replaces, refusing calls.

    def max_connections(self) -> int:
        return UNLIMITED

    def canonical_name(self) -> str:
        # Inspect looks up prices and context lengths by it.
        return MODEL_NAME

    def should_retry(self, ex: BaseException) -> bool:
        return False

    async def count_text_tokens(self, text: str) -> int:
        episode = _CURRENT.get() or self.episodes.get(_inspect_private.active_epoch() or 0)
        count = getattr(episode.policy, "count_text_tokens", None) if episode else None
        return (count or estimated_tokens)(text)

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        if self.instead_of is not None:
            raise BridgeError(
                f"the solver asks the model of the role {self.instead_of!r} before it calls the policy; its "
                "prompt is not known without that model's reply"
            )
        episode = _CURRENT.get()
        if episode is None and self.allow_self_grading:
            episode = self.episodes.get(_inspect_private.active_epoch() or 0)
        if episode is None:
            raise self._refuse_self_grading()
        return await episode.generate(
            GenerateRequest(list(input), list(tools), tool_choice, config, self.role)
        )

    def _refuse_self_grading(self) -> SelfGradingError:
        error = SelfGradingError()
        episode = self.episodes.get(_inspect_private.active_epoch() or 0)
        if episode is not None:
            episode.failure, episode.self_graded = error, True
        return error


@modelapi(name="tinkerbridge")
def _policy_api() -> type[ModelAPI]:  # pyright: ignore[reportUnusedFunction] (registered under its name)
    return _PolicyAPI


async def _answer(policy: ChatPolicy, request: GenerateRequest) -> ModelOutput:
    return await policy.generate(request)


def _is_cancelling() -> bool:
    # The awaited object may be cancelled alone.
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
