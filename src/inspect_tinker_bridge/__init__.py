"""Inspect AI tasks as Tinker RL environments, with the task's own solver, tools, sandbox and scorers.

    from inspect_tinker_bridge import load_environment

    dataset = load_environment("tasks.py@sums", renderer, num_envs_per_group=8, batch_size=32)
    for builder in dataset.get_batch(0):
        group = await do_group_rollout(builder, policy)  # tinker_cookbook
        rewards = group.get_total_rewards()

Without Tinker, `TaskRunner` runs episodes against any `ChatPolicy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inspect_tinker_bridge.episodes import ChatPolicy, EpisodeOutcome, GenerateRequest
from inspect_tinker_bridge.errors import (
    BridgeError,
    EnvironmentConfigError,
    EpisodeAbandonedError,
    EpisodeError,
    InvalidTaskError,
    RunnerError,
    SandboxError,
    SelfGradingError,
    TaskArgumentsError,
    TaskError,
    TaskFailedError,
    TaskNotFoundError,
    UnsupportedError,
)
from inspect_tinker_bridge.ground_truth import get_ground_truth_messages
from inspect_tinker_bridge.records import SavedRollout, pack_transcript, write_inspect_log
from inspect_tinker_bridge.runner import RunnerOptions, TaskRunner
from inspect_tinker_bridge.sandbox import (
    SandboxConfig,
    SandboxInstance,
    cleanup_sandbox,
    create_sandbox_for_sample,
    exec_in_sandbox,
    sandbox_context,
)
from inspect_tinker_bridge.scoring import EpisodeReward, compute_reward, score_episode
from inspect_tinker_bridge.tasks import SUBMIT_INSTRUCTION, AgentOptions, InspectTaskInfo, load_inspect_task

if TYPE_CHECKING:
    from inspect_tinker_bridge.dataset import inspect_dataset_to_hf
    from inspect_tinker_bridge.env import EnvOptions, InspectEnv, InspectEnvGroupBuilder, InspectRLDataset
    from inspect_tinker_bridge.loader import InspectRLDatasetBuilder, load_environment

__all__ = [
    "SUBMIT_INSTRUCTION",
    "AgentOptions",
    "BridgeError",
    "ChatPolicy",
    "EnvOptions",
    "EnvironmentConfigError",
    "EpisodeAbandonedError",
    "EpisodeError",
    "EpisodeOutcome",
    "EpisodeReward",
    "GenerateRequest",
    "InspectEnv",
    "InspectEnvGroupBuilder",
    "InspectRLDataset",
    "InspectRLDatasetBuilder",
    "InspectTaskInfo",
    "InvalidTaskError",
    "RunnerError",
    "RunnerOptions",
    "SandboxConfig",
    "SandboxError",
    "SandboxInstance",
    "SavedRollout",
    "SelfGradingError",
    "TaskArgumentsError",
    "TaskError",
    "TaskFailedError",
    "TaskNotFoundError",
    "TaskRunner",
    "UnsupportedError",
    "cleanup_sandbox",
    "compute_reward",
    "create_sandbox_for_sample",
    "exec_in_sandbox",
    "get_ground_truth_messages",
    "inspect_dataset_to_hf",
    "load_environment",
    "load_inspect_task",
    "pack_transcript",
    "sandbox_context",
    "score_episode",
    "write_inspect_log",
]


def __getattr__(name: str) -> object:
    if name == "inspect_dataset_to_hf":
        from inspect_tinker_bridge import dataset as module  # noqa: PLC0415 (needs tinker_cookbook)
    elif name in {"EnvOptions", "InspectEnv", "InspectEnvGroupBuilder", "InspectRLDataset"}:
        from inspect_tinker_bridge import env as module  # noqa: PLC0415 (needs tinker_cookbook)
    elif name in {"InspectRLDatasetBuilder", "load_environment"}:
        from inspect_tinker_bridge import loader as module  # noqa: PLC0415 (needs tinker_cookbook)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
