"""`load_environment`: the one call from a task to a Tinker dataset.

Invariant: every option is checked before the task is loaded, and none is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from inspect_ai.model import Model
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Renderer, get_registered_renderer_names, get_renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_bridge.env import EnvOptions, EnvType, InspectEnvGroupBuilder, InspectRLDataset
from inspect_tinker_bridge.errors import EnvironmentConfigError
from inspect_tinker_bridge.tasks import TaskLike, load_inspect_task

_OLD_NAMES = {"LlamaRenderer": "llama3", "QwenRenderer": "qwen3"}


def load_environment(
    task: TaskLike,
    renderer: Renderer | str,
    env_type: EnvType = "single_turn",
    max_samples: int | None = None,
    max_turns: int = 10,
    num_envs_per_group: int = 1,
    batch_size: int = 1,
    *,
    tokenizer: Tokenizer | None = None,
    task_args: Mapping[str, Any] | None = None,
    scorer_weights: Mapping[str, float] | None = None,
    model_roles: Mapping[str, str | Model] | None = None,
) -> InspectRLDataset:
    """A task's samples as a Tinker dataset of environments.

    `task` is a task function, a Task, `file.py@name` or a registered name; `task_args` go to its function.
    `renderer` is a tinker_cookbook renderer, or the name of one beside a `tokenizer`. `env_type` is
    `single_turn` (one action, then the score) or `task` (the task's solver runs, `max_turns` actions at
    most). A batch is `batch_size` samples with `num_envs_per_group` episodes each; `max_samples` keeps the
    first ones. Sampling parameters are the trainer's: of the task's GenerateConfig only `stop_seqs` applies.

    Raises EnvironmentConfigError for an option that cannot be used, and the errors of `load_inspect_task`.
    """
    if env_type not in get_args(EnvType):
        raise EnvironmentConfigError(f"env_type is {env_type!r}; it is one of {', '.join(get_args(EnvType))}")
    _at_least_1(max_turns=max_turns, num_envs_per_group=num_envs_per_group, batch_size=batch_size)
    if max_samples is not None:
        _at_least_1(max_samples=max_samples)
    info = load_inspect_task(task, **dict(task_args or {}))
    samples = info.samples[:max_samples]
    if not samples:
        raise EnvironmentConfigError(f"the task {info.name!r} has no samples")
    options = EnvOptions(env_type, max_turns, scorer_weights, model_roles)
    builder = InspectEnvGroupBuilder(
        info, samples[0], _renderer(renderer, tokenizer), num_envs_per_group, options
    )
    return InspectRLDataset(builder, samples, batch_size)


def renderer_names() -> list[str]:
    """Names that tinker_cookbook's `get_renderer` knows (as it documents them) and registered ones."""
    documented = re.findall(r'^\s*- ``"(\w+)"``', get_renderer.__doc__ or "", flags=re.MULTILINE)
    return sorted({*documented, *get_registered_renderer_names()})


def _renderer(renderer: Renderer | str, tokenizer: Tokenizer | None) -> Renderer:
    if isinstance(renderer, Renderer):
        if tokenizer is not None:
            raise EnvironmentConfigError("a Renderer has its own tokenizer: give no `tokenizer` beside it")
        return renderer
    names = renderer_names()
    if renderer not in names:
        old = _OLD_NAMES.get(renderer)
        hint = f"; older documents call {old!r} so" if old else ""
        raise EnvironmentConfigError(f"no renderer is called {renderer!r}{hint}. Known: {', '.join(names)}")
    if tokenizer is None:
        raise EnvironmentConfigError(
            f"the renderer {renderer!r} needs a tokenizer: pass tokenizer=get_tokenizer(model_name), "
            "or the Renderer itself"
        )
    try:
        return get_renderer(renderer, tokenizer)
    except RendererError as error:
        raise EnvironmentConfigError(f"the renderer {renderer!r} cannot be made: {error}") from error


def _at_least_1(**options: int) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or value < 1:
            raise EnvironmentConfigError(f"{name} is {value!r}; it must be at least 1")
