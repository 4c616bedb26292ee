"""Turn a task into a Tinker dataset: `load_environment`, and `InspectRLDatasetBuilder` for tinker_cookbook.

Importing this module registers older renderer names with tinker_cookbook. Train and test sets share no sample
unless the task's arguments say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import chz
from inspect_ai.dataset import Sample
from inspect_ai.model import Model
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import (
    Renderer,
    get_registered_renderer_names,
    get_renderer,
    is_renderer_registered,
    register_renderer,
)
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer

from inspect_tinker_bridge.conversion import check_for_tinker
from inspect_tinker_bridge.env import EnvOptions, EnvType, InspectEnvGroupBuilder, InspectRLDataset
from inspect_tinker_bridge.errors import EnvironmentConfigError, InvalidTaskError, require_counts
from inspect_tinker_bridge.runner import RunnerOptions
from inspect_tinker_bridge.sandbox import SandboxConfig, check_sandboxes
from inspect_tinker_bridge.scoring import check_weights
from inspect_tinker_bridge.tasks import (
    SUBMIT_INSTRUCTION,
    AgentOptions,
    InspectTaskInfo,
    TaskLike,
    load_inspect_task,
)

__all__ = ["InspectRLDatasetBuilder", "load_environment"]

OLD_RENDERER_NAMES = {"LlamaRenderer": "llama3", "QwenRenderer": "qwen3"}


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
    shuffle_seed: int | None = 0,
    scorer_weights: Mapping[str, float] | None = None,
    model_roles: Mapping[str, str | Model] | None = None,
    allow_self_grading: bool = False,
    tool_timeout: int = AgentOptions.tool_timeout_s,
    tokenizer: Tokenizer | None = None,
    image_processor: Any = None,
    task_args: Mapping[str, Any] | None = None,
    **task_kwargs: Any,
) -> InspectRLDataset:
    """Make a Tinker dataset of environments from a task's samples.

    `task` (see `TaskLike`) gets `task_args` and further
    keyword arguments. `renderer` is a tinker_cookbook renderer, or its name with a `tokenizer`, and for
    images an `image_processor`.

    `env_type`: `single_turn` takes and scores one action. `multi_turn` gives a task without an agent one with
    bash, python (limited to `tool_timeout` seconds) and submit in its sandbox, and adds `submit_instruction`
    to the system message. `task` runs the task's own solver or agent. The last two take at most `max_turns`
    actions.

    A batch is `batch_size` samples with `num_envs_per_group` episodes each. `max_samples` keeps the first
    samples. `num_epochs` passes go over them; with `shuffle`, each in a new order drawn from `shuffle_seed`
    (None draws a seed).

    `sandbox_type` and `sandbox_config` (path of the provider's config file) replace the task's sandbox.
    `scorer_weights` is by scorer name. `model_roles` names the models of graders and simulated users;
    `allow_self_grading` lets a scorer without a grader call the policy.

    The trainer chooses the sampling parameters: of the task's GenerateConfig, only `stop_seqs` applies.

    Raises EnvironmentConfigError for an unusable option, UnsupportedError for a GenerateConfig that a policy
    does not support, SandboxError, and the errors of `load_inspect_task`.
    """
    _check_self_grading(env_type, allow_self_grading)
    if max_samples is not None:
        require_counts(max_samples=max_samples)
    if sandbox_config is not None and sandbox_type is None:
        raise EnvironmentConfigError(f"sandbox_config {sandbox_config!r} needs a sandbox_type; pass both")
    sandbox = SandboxConfig(sandbox_type, sandbox_config) if sandbox_type is not None else None
    agent = AgentOptions(submit_instruction, tool_timeout)
    options = EnvOptions(
        env_type=env_type,
        max_turns=max_turns,
        scorer_weights=scorer_weights,
        runner=RunnerOptions(
            model_roles, sandbox, agent if env_type == "multi_turn" else None, allow_self_grading
        ),
    )
    made = _make_renderer(renderer, tokenizer, image_processor)
    info = load_inspect_task(task, **{**(task_args or {}), **task_kwargs})
    samples = info.samples[:max_samples]
    _check_task(info, samples, options)
    builder = InspectEnvGroupBuilder(info, samples[0], made, num_envs_per_group, options)
    return InspectRLDataset(
        builder, samples, batch_size, num_epochs=num_epochs, shuffle=shuffle, shuffle_seed=shuffle_seed
    )


@chz.chz
class InspectRLDatasetBuilder(RLDatasetBuilder):
    """Configures an Inspect task as the dataset of `tinker_cookbook.rl.train` and its command line.

    The test set is `test_samples` held-out samples, the task with `test_task_args`, or none. See
    `load_environment` for other fields.
    """

    task: str = chz.field(doc="file.py@name or a registered name")
    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int = 1
    num_envs_per_group: int = 1
    env_type: Literal["single_turn", "multi_turn", "task"] = "single_turn"
    max_samples: int | None = None
    max_turns: int = 10
    sandbox_type: str | None = None
    sandbox_config: str | None = None
    submit_instruction: str | None = SUBMIT_INSTRUCTION
    num_epochs: int = 1
    shuffle: bool = True
    seed: int = chz.field(default=0, doc="seed of the sample order and of the split")
    tool_timeout: int = AgentOptions.tool_timeout_s
    allow_self_grading: bool = False
    images: bool = chz.field(default=False, doc="load the model's image processor, for messages with images")
    task_args: Mapping[str, Any] | None = None
    test_samples: int = chz.field(default=0, doc="samples held out for the test set")
    test_task_args: Mapping[str, Any] | None = chz.field(default=None, doc="arguments of the test task")
    scorer_weights: Mapping[str, float] | None = None
    model_roles: Mapping[str, str | Model] | None = None

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Raises the errors of `load_environment`."""
        if self.test_samples and self.test_task_args is not None:
            raise EnvironmentConfigError("pass test_samples or test_task_args, not both")
        whole = self._load(self.task_args, self.num_envs_per_group, self.num_epochs, shuffle=self.shuffle)
        if self.test_samples:
            return whole.split(self.test_samples, seed=self.seed)
        if self.test_task_args is not None:
            return whole, self._load(self.test_task_args, 1, 1, shuffle=False)
        return whole, None

    def _load(
        self, task_args: Mapping[str, Any] | None, group_size: int, epochs: int, *, shuffle: bool
    ) -> InspectRLDataset:
        return load_environment(
            self.task,
            self.renderer_name,
            num_envs_per_group=group_size,
            num_epochs=epochs,
            shuffle=shuffle,
            shuffle_seed=self.seed,
            tokenizer=get_tokenizer(self.model_name_for_tokenizer),
            image_processor=get_image_processor(self.model_name_for_tokenizer) if self.images else None,
            task_args=task_args,
            **{name: getattr(self, name) for name in _SHARED},
        )


_SHARED = (
    *("env_type", "batch_size", "max_samples", "max_turns", "sandbox_type", "sandbox_config"),
    *("submit_instruction", "scorer_weights", "model_roles", "allow_self_grading", "tool_timeout"),
)


def _check_self_grading(env_type: str, allow_self_grading: bool) -> None:
    if allow_self_grading and env_type == "single_turn":
        raise EnvironmentConfigError(
            "a single_turn episode has one action, and allow_self_grading would make the grade another: "
            "use env_type='task'"
        )


def _check_task(info: InspectTaskInfo, samples: Sequence[Sample], options: EnvOptions) -> None:
    # These problems would fail every episode.
    if not samples:
        raise InvalidTaskError(f"the task {info.name!r} has no samples")
    if not info.scorers:
        raise InvalidTaskError(f"the task {info.name!r} has no scorer; a reward needs one")
    if options.scorer_weights is not None:
        check_weights(options.scorer_weights, info.scorer_names)
    check_for_tinker(info.task.config)
    in_sandbox = check_sandboxes(info.task, samples, options.runner.sandbox)
    if options.env_type == "multi_turn" and not in_sandbox:
        raise EnvironmentConfigError(
            f"env_type='multi_turn' runs bash and python, and the task {info.name!r} has no sandbox: "
            "pass sandbox_type='docker', or 'local' to run the model's commands on this machine"
        )


def _renderer_names() -> list[str]:
    documented = re.findall(r'^\s*- ``"(\w+)"``', get_renderer.__doc__ or "", flags=re.MULTILINE)
    return sorted({*documented, *get_registered_renderer_names()})


def _make_renderer(renderer: Renderer | str, tokenizer: Tokenizer | None, image_processor: Any) -> Renderer:
    if isinstance(renderer, Renderer):
        if tokenizer is not None or image_processor is not None:
            raise EnvironmentConfigError(
                "a Renderer has its own tokenizer and image processor; leave out `tokenizer` and "
                "`image_processor`"
            )
        return renderer
    names = _renderer_names()
    if renderer not in names:
        raise EnvironmentConfigError(f"no renderer is called {renderer!r}; known: {', '.join(names)}")
    if tokenizer is None:
        raise EnvironmentConfigError(
            f"the renderer {renderer!r} needs a tokenizer: pass tokenizer=get_tokenizer(model_name), "
            "or the Renderer itself"
        )
    try:
        made = get_renderer(renderer, tokenizer, image_processor)
        made.get_stop_sequences()  # Some fail here if the tokenizer lacks their tokens.
        return made
    except (RendererError, ValueError, AssertionError) as error:
        raise EnvironmentConfigError(
            f"the renderer {renderer!r} cannot be created; does it fit the tokenizer's model? {error}"
        ) from error


def _alias(name: str) -> Callable[[Tokenizer, Any], Renderer]:
    def make(tokenizer: Tokenizer, image_processor: Any = None) -> Renderer:
        return get_renderer(name, tokenizer, image_processor)

    return make


for _old, _name in OLD_RENDERER_NAMES.items():
    if not is_renderer_registered(_old):
        register_renderer(_old, _alias(_name))
