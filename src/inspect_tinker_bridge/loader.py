"""`load_environment`: the one call from a task to a Tinker dataset.

Invariant: every option is checked before the first episode, and none is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from inspect_ai.model import Model
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_bridge.agent import SUBMIT_INSTRUCTION, AgentOptions
from inspect_tinker_bridge.custom_reward import DEFAULT_TIMEOUT_S, CustomRewardFn
from inspect_tinker_bridge.errors import EnvironmentConfigError, InvalidTaskError
from inspect_tinker_bridge.groups import InspectEnvGroupBuilder, InspectRLDataset
from inspect_tinker_bridge.options import EnvOptions, EnvType
from inspect_tinker_bridge.renderer_names import make_renderer
from inspect_tinker_bridge.rollout_log import RolloutLog
from inspect_tinker_bridge.runner import RunnerOptions
from inspect_tinker_bridge.sandbox import SandboxConfig
from inspect_tinker_bridge.tasks import InspectTaskInfo, TaskLike, load_inspect_task


def load_environment(
    task: TaskLike,
    renderer: Renderer | str,
    env_type: EnvType = "single_turn",
    max_samples: int | None = None,
    max_turns: int = 10,
    num_envs_per_group: int = 1,
    batch_size: int = 1,
    sandbox_type: str | None = None,
    sandbox_config: str | None = None,
    submit_instruction: str | None = SUBMIT_INSTRUCTION,
    *,
    num_epochs: int = 1,
    shuffle: bool = False,
    shuffle_seed: int = 0,
    custom_reward_fn: CustomRewardFn | None = None,
    custom_reward_fn_timeout: float = DEFAULT_TIMEOUT_S,
    scorer_weights: Mapping[str, float] | None = None,
    model_roles: Mapping[str, str | Model] | None = None,
    allow_self_grading: bool = False,
    tool_timeout: int = AgentOptions.tool_timeout_s,
    rollout_log: RolloutLog | None = None,
    tokenizer: Tokenizer | None = None,
    task_args: Mapping[str, Any] | None = None,
    **task_kwargs: Any,
) -> InspectRLDataset:
    """A task's samples as a Tinker dataset of environments.

    `task`: a task function, a Task, `file.py@name` or a registered name. `task_args` and every further
    keyword go to its function. `renderer`: a tinker_cookbook renderer, or one's name beside a `tokenizer`.

    `env_type`: `single_turn` is one action, then the score. `multi_turn` gives a task that has no agent of
    its own one with bash, python and submit in its sandbox; `submit_instruction` goes into the system
    message, and a bash or python call may take `tool_timeout` seconds. `task` runs the task's own solver or
    agent. The last two take `max_turns` actions at most.

    A batch is `batch_size` samples with `num_envs_per_group` episodes each. `max_samples` keeps the first
    samples; `num_epochs` goes over them so often, with `shuffle` in a new order each time, drawn from
    `shuffle_seed`.

    `sandbox_type` and `sandbox_config` (a file of the provider) replace the task's own sandbox.
    `scorer_weights` weigh the scorers by name; `custom_reward_fn` replaces the reward (see `ScoringContext`),
    within `custom_reward_fn_timeout` seconds. `model_roles` name the models of graders and simulated users;
    `allow_self_grading` lets a scorer without one ask the policy, which is refused otherwise.

    `rollout_log` saves rollouts of every n-th batch as JSON lines and as Inspect logs.

    Sampling parameters are the trainer's: of the task's GenerateConfig only `stop_seqs` applies.

    Raises EnvironmentConfigError (a ValueError) for an option that cannot be used, and the errors of
    `load_inspect_task`.
    """
    _check_env_type(env_type, allow_self_grading)
    _at_least_1(
        max_turns=max_turns,
        num_envs_per_group=num_envs_per_group,
        batch_size=batch_size,
        num_epochs=num_epochs,
        tool_timeout=tool_timeout,
    )
    if max_samples is not None:
        _at_least_1(max_samples=max_samples)
    if not custom_reward_fn_timeout > 0:
        raise EnvironmentConfigError(
            f"custom_reward_fn_timeout is {custom_reward_fn_timeout!r}; it must be more than 0 seconds"
        )
    if sandbox_config is not None and sandbox_type is None:
        raise EnvironmentConfigError(f"sandbox_config {sandbox_config!r} needs a sandbox_type beside it")
    sandbox = SandboxConfig(sandbox_type, sandbox_config) if sandbox_type is not None else None
    agent = AgentOptions(submit_instruction, tool_timeout) if env_type == "multi_turn" else None
    info = load_inspect_task(task, **{**(task_args or {}), **task_kwargs})
    samples = info.samples[:max_samples]
    _check_task(info, env_type, sandbox)
    options = EnvOptions(
        env_type=env_type,
        max_turns=max_turns,
        scorer_weights=scorer_weights,
        runner=RunnerOptions(model_roles, sandbox, agent, allow_self_grading),
        custom_reward_fn=custom_reward_fn,
        custom_reward_fn_timeout=custom_reward_fn_timeout,
        rollout_log=rollout_log,
    )
    made = make_renderer(renderer, tokenizer)
    builder = InspectEnvGroupBuilder(info, samples[0], made, num_envs_per_group, options)
    return InspectRLDataset(
        builder, samples, batch_size, num_epochs=num_epochs, shuffle=shuffle, shuffle_seed=shuffle_seed
    )


def _check_env_type(env_type: str, allow_self_grading: bool) -> None:
    if env_type not in get_args(EnvType):
        raise EnvironmentConfigError(f"env_type is {env_type!r}; it is one of {', '.join(get_args(EnvType))}")
    if allow_self_grading and env_type == "single_turn":
        raise EnvironmentConfigError(
            "a single_turn episode has one action, and allow_self_grading makes the grade one more: "
            "use env_type='task'"
        )


def _check_task(info: InspectTaskInfo, env_type: str, sandbox: SandboxConfig | None) -> None:
    if not info.samples:
        raise InvalidTaskError(f"the task {info.name!r} has no samples")
    if not info.scorers:
        raise InvalidTaskError(f"the task {info.name!r} has no scorer: a reward needs one")
    has_sandbox = sandbox is not None or info.sandbox_type is not None
    if env_type == "multi_turn" and not has_sandbox and any(s.sandbox is None for s in info.samples):
        raise EnvironmentConfigError(
            f"env_type='multi_turn' runs bash and python, and the task {info.name!r} has no sandbox: "
            "pass sandbox_type='docker', or 'local' to run the model's commands on this machine"
        )


def _at_least_1(**options: int) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or value < 1:
            raise EnvironmentConfigError(f"{name} is {value!r}; it must be at least 1")
