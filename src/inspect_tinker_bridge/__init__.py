"""Inspect AI tasks as Tinker RL environments: the task's own solver, tools, sandbox and scorers, unchanged.

    from inspect_tinker_bridge import load_environment

    dataset = load_environment("tasks.py@sums", renderer, num_envs_per_group=8, batch_size=32)
    for builder in dataset.get_batch(0):
        group = await do_group_rollout(builder, policy)   # tinker_cookbook
        rewards = group.get_total_rewards()

Without Tinker, `TaskRunner` runs episodes against any `Policy`. So that a machine without tinker_cookbook
can do that, the names that need it are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from inspect_tinker_bridge.episodes import EpisodeOutcome, GenerateRequest, Policy
from inspect_tinker_bridge.errors import (
    BridgeError,
    ConversionError,
    EnvironmentConfigError,
    EpisodeAbandonedError,
    EpisodeError,
    InvalidTaskError,
    RunnerError,
    SelfGradingError,
    TaskArgumentsError,
    TaskError,
    TaskFailedError,
    TaskNotFoundError,
)
from inspect_tinker_bridge.runner import TaskRunner
from inspect_tinker_bridge.scoring import EpisodeReward, score_episode
from inspect_tinker_bridge.tasks import InspectTaskInfo, load_inspect_task

if TYPE_CHECKING:
    from inspect_tinker_bridge.env import InspectEnv, InspectEnvGroupBuilder, InspectRLDataset
    from inspect_tinker_bridge.loader import load_environment

__all__ = [
    "BridgeError",
    "ConversionError",
    "EnvironmentConfigError",
    "EpisodeAbandonedError",
    "EpisodeError",
    "EpisodeOutcome",
    "EpisodeReward",
    "GenerateRequest",
    "InspectEnv",
    "InspectEnvGroupBuilder",
    "InspectRLDataset",
    "InspectTaskInfo",
    "InvalidTaskError",
    "Policy",
    "RunnerError",
    "SelfGradingError",
    "TaskArgumentsError",
    "TaskError",
    "TaskFailedError",
    "TaskNotFoundError",
    "TaskRunner",
    "load_environment",
    "load_inspect_task",
    "score_episode",
]

_NEED_TINKER = {
    "InspectEnv": "env",
    "InspectEnvGroupBuilder": "env",
    "InspectRLDataset": "env",
    "load_environment": "loader",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_TINKER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TINKER[name]}"), name)
