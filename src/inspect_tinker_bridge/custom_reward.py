"""Rewards by a function of the user's, from what the scorers said.

Invariant: a function that raises, takes too long or returns no finite number fails the episode; it is never
a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage
from inspect_ai.scorer import Score

from inspect_tinker_bridge.episodes import EpisodeOutcome
from inspect_tinker_bridge.errors import TaskFailedError
from inspect_tinker_bridge.scoring import EpisodeReward

DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ScoringContext:
    """What a custom reward function gets to see of a scored episode.

    The sandbox is gone by then: a reward that needs it is an Inspect scorer.
    """

    sample: Sample
    conversation: list[ChatMessage]
    """The whole conversation, Inspect's messages."""

    completion: str
    """The text that the scorers scored."""

    scores: Mapping[str, Score]
    """By scorer name."""

    individual_rewards: Mapping[str, float]
    """Each score as a float: `scorer`, or `scorer/key` for one with several values."""

    base_reward: float
    """The reward without the function."""

    current_turn: int
    """Actions of the episode."""

    max_turns: int
    answer: str | list[str]
    """The sample's target."""

    limit: str | None
    """The limit that ended the solver, or None."""

    @classmethod
    def of(
        cls, sample: Sample, outcome: EpisodeOutcome, scored: EpisodeReward, turns: int, max_turns: int
    ) -> ScoringContext:
        """The context of a scored outcome."""
        return cls(
            sample=sample,
            conversation=outcome.messages,
            completion=outcome.completion,
            scores=outcome.scores,
            individual_rewards=scored.values,
            base_reward=scored.reward,
            current_turn=turns,
            max_turns=max_turns,
            answer=sample.target,
            limit=outcome.limit,
        )


Rewarded: TypeAlias = float | tuple[float, Mapping[str, float]]
CustomRewardFn: TypeAlias = Callable[[ScoringContext], Rewarded | Awaitable[Rewarded]]
"""The reward, or the reward and metrics by name. A sync function runs in a thread."""


async def custom_reward(
    function: CustomRewardFn, context: ScoringContext, timeout_s: float = DEFAULT_TIMEOUT_S
) -> EpisodeReward:
    """The function's reward; its metrics are named `reward/<name>`.

    Raises TaskFailedError, from the cause, if the function raises, takes longer than `timeout_s`, or returns
    anything but a finite number, or one and a mapping of names to finite numbers.
    """
    sample_id = context.sample.id if context.sample.id is not None else ""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        async with asyncio.timeout(timeout_s):
            returned = await _call(function, context)
    except TimeoutError as error:
        cause = f"the reward function {name} raised {error!r}, or took longer than {timeout_s} s"
        raise TaskFailedError(sample_id, cause) from error
    except Exception as error:
        raise TaskFailedError(sample_id, f"the reward function {name} raised {error!r}") from error
    reward, metrics = returned if isinstance(returned, tuple) else (returned, {})
    for what, value in {"reward": reward, **metrics}.items():
        if not _is_finite_number(value):
            raise TaskFailedError(
                sample_id, f"the reward function {name} gave {what}={value!r}, not a finite number"
            )
    return EpisodeReward(
        reward=float(reward),
        values=dict(context.individual_rewards),
        metrics={f"reward/{key}": float(value) for key, value in metrics.items()},
    )


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


async def _call(function: CustomRewardFn, context: ScoringContext) -> Rewarded:
    if inspect.iscoroutinefunction(function):
        return await function(context)
    returned = await asyncio.to_thread(function, context)
    return await returned if inspect.isawaitable(returned) else returned
