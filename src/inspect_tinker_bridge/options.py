"""What the environments of a dataset have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inspect_tinker_bridge.custom_reward import DEFAULT_TIMEOUT_S, CustomRewardFn
from inspect_tinker_bridge.rollout_log import RolloutLog
from inspect_tinker_bridge.runner import RunnerOptions

EnvType = Literal["single_turn", "multi_turn", "task"]
"""`single_turn`: one action, then the score. `multi_turn`: an agent with bash, python and submit. `task`: the
task's own solver decides. The last two end after `max_turns` actions."""


@dataclass(frozen=True)
class EnvOptions:
    """Options of every environment of a dataset. Pickle them: functions must be found in their module."""

    env_type: EnvType = "single_turn"
    max_turns: int = 10
    """Actions of an episode that is not `single_turn`; the next model call ends it, and it is scored."""

    scorer_weights: Mapping[str, float] | None = None
    """Weight of each scorer by name; equal if None."""

    runner: RunnerOptions = field(default_factory=RunnerOptions)
    """How the episodes differ from the task as it is written."""

    custom_reward_fn: CustomRewardFn | None = None
    """The reward in place of the weighted scores."""

    custom_reward_fn_timeout: float = DEFAULT_TIMEOUT_S
    """Seconds that it may take."""

    rollout_log: RolloutLog | None = None
    """Where rollouts are saved; None saves none."""
