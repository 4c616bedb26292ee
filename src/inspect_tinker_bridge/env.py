"""An Inspect episode turned inside out into a Tinker `Env`: the solver's `generate()` waits for `step`.

Invariants: each observation extends the previous one and its action unless labelled `fork`; a failure
raises TaskFailedError and is never a reward of 0; `cleanup` ends what the trainer left unfinished.
"""

from __future__ import annotations

import asyncio

import tinker
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageAssistant, GenerateConfig
from inspect_ai.util import LimitExceededError
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    StepResult,
    StopReason,
)

from inspect_tinker_bridge.custom_reward import ScoringContext, custom_reward
from inspect_tinker_bridge.episodes import EpisodeOutcome, GenerateRequest
from inspect_tinker_bridge.errors import ConversionError, TaskFailedError
from inspect_tinker_bridge.messages import (
    parse_action,
    to_model_output,
    to_renderer_message,
    to_renderer_messages,
)
from inspect_tinker_bridge.options import EnvOptions
from inspect_tinker_bridge.runner import TaskRunner
from inspect_tinker_bridge.scoring import EpisodeReward, score_episode
from inspect_tinker_bridge.tasks import InspectTaskInfo
from inspect_tinker_bridge.token_buffer import Prompt, TokenBuffer
from inspect_tinker_bridge.turnstile import PendingCall, Turnstile

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


class InspectEnv(Env):
    """One episode of one sample. Single use; starts at `initial_observation`.

    Metrics of a step: `fork` is 1 if the next observation does not extend this one and its action. Of the
    last step: `stop/<reason>`, `turns`, `score/<scorer>` and, if the solver no longer waited for the action
    (a limit of the task ended it first), `action_unseen`.
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
        """`task` is the sample's, where the runner runs several."""
        self._runner = runner
        self._task = task
        self._sample = sample
        self._renderer = renderer
        self._options = options or EnvOptions()
        self._buffer = TokenBuffer(renderer)
        self._turnstile = Turnstile()
        self._episode: asyncio.Task[EpisodeOutcome] | None = None
        self._call: PendingCall | None = None
        self._prompt = Prompt([], False)
        self._turns = 0
        self._rewarded = False
        self.outcome: EpisodeOutcome | None = None
        """How the episode ended, once it has been scored."""

        self.actions: list[tuple[list[int], list[int]]] = []
        """Prompt ids and sampled ids of each action so far."""

        self.exchanges: list[tuple[list[ChatMessage], ChatMessage]] = []
        """The messages of each of these prompts, and what the action said."""

        self.scored: EpisodeReward | None = None
        """The reward, once it has been given."""

    async def initial_observation(
        self,
    ) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        """Start the episode: the prompt of its first model call (token ids) and what ends an action.

        A solver that ends without a model call is scored, and reported as an episode without an action.
        Raises TaskFailedError if the solver or a scorer raises, and RunnerError.
        """
        self._episode = asyncio.create_task(self._runner.run(self._sample, self._turnstile, task=self._task))
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
        """Give the action (sampled token ids) to the solver and wait for its next model call or its end.

        Raises TaskFailedError if the solver or a scorer raises, or a `single_turn` episode calls twice.
        """
        if self._call is None:
            raise TaskFailedError(self._id, "step() needs an observation first, and none after the last step")
        unseen = self._answer(self._call, action, truncated=(extra or {}).get("stop_reason") == "length")
        outcome = await self._advance()
        if outcome is not None:
            scored = await self._score(outcome)
            metrics = {**self._metrics(outcome, scored), "action_unseen": float(unseen)}
            return StepResult(
                scored.reward, True, tinker.ModelInput.empty(), [], metrics=metrics, logs=_logs(outcome)
            )
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
        outcome = self._episode.result()
        scored = await self._score(outcome)
        return scored.reward, self._metrics(outcome, scored)

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
        if self._episode is None:
            raise TaskFailedError(self._id, "the episode was not started")
        while (call := await self._turnstile.next_call(self._episode)) is not None:
            if self._turns == self._allowed_turns:
                self._refuse(call)
            elif not call.reply.done():
                self._call, self._prompt = call, self._render(call.request)
                return None
        return self._episode.result()

    @property
    def _allowed_turns(self) -> int:
        return 1 if self._options.env_type == "single_turn" else self._options.max_turns

    def _refuse(self, call: PendingCall) -> None:
        """End the solver. In a single turn only the policy's tool call may lead to another model call."""
        limit = self._allowed_turns
        if self._options.env_type == "single_turn" and not _called_a_tool(call.request):
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

    def _answer(self, call: PendingCall, action: list[int], *, truncated: bool) -> bool:
        """Give the solver its answer; whether it had gone already."""
        offered = bool(call.request.tools) and call.request.tool_choice != "none"
        parsed = parse_action(self._renderer, action, tools_offered=offered)
        output = to_model_output(
            parsed, prompt_tokens=len(self._prompt.ids), sampled_tokens=len(action), truncated=truncated
        )
        self.actions.append((self._prompt.ids, list(action)))
        self.exchanges.append((call.request.messages, output.message))
        self._buffer.answer(action, to_renderer_message(output.message))
        self._turns += 1
        unseen = call.reply.done()
        if not unseen:
            call.reply.set_result(output)
        return unseen

    async def _score(self, outcome: EpisodeOutcome) -> EpisodeReward:
        options = self._options
        self.outcome = outcome
        scored = score_episode(outcome, options.scorer_weights)
        self._rewarded = True
        if options.custom_reward_fn is not None:
            context = ScoringContext.of(self._sample, outcome, scored, self._turns, self._allowed_turns)
            timeout_s = options.custom_reward_fn_timeout
            scored = await custom_reward(options.custom_reward_fn, context, timeout_s)
        self.scored = scored
        return scored

    def _metrics(self, outcome: EpisodeOutcome, scored: EpisodeReward) -> Metrics:
        stop = _STOPS.get(outcome.limit, outcome.limit) if outcome.limit else StopReason.COMPLETED
        metrics: Metrics = {f"score/{name}": value for name, value in scored.values.items()}
        return {**metrics, **scored.metrics, f"stop/{stop}": 1.0, "turns": float(self._turns)}


def _logs(outcome: EpisodeOutcome) -> Logs:
    """What each scorer took for the answer, and why it scored so."""
    logs: Logs = {}
    for name, score in outcome.scores.items():
        said = {"answer": score.answer, "explanation": score.explanation}
        logs.update({f"{key}/{name}": text for key, text in said.items() if text is not None})
    return logs


def _called_a_tool(request: GenerateRequest) -> bool:
    """Whether what the policy said last was a tool call; there may be no such tool, or none at all."""
    said = [message for message in request.messages if isinstance(message, ChatMessageAssistant)]
    return bool(said and said[-1].tool_calls)


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
