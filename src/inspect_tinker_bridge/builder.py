"""`InspectRLDatasetBuilder`: what `tinker_cookbook.rl.train` and its command line configure a dataset with.

Invariant: train and test never share a sample, unless the task's own arguments make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import chz
from inspect_ai.model import Model
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_bridge.agent import SUBMIT_INSTRUCTION
from inspect_tinker_bridge.custom_reward import CustomRewardFn
from inspect_tinker_bridge.errors import EnvironmentConfigError
from inspect_tinker_bridge.groups import InspectRLDataset
from inspect_tinker_bridge.loader import load_environment


@chz.chz
class InspectRLDatasetBuilder(RLDatasetBuilder):
    """An Inspect task as the dataset of a training run.

    The test set is `test_samples` held-out samples, or the task made with `test_task_args`, or none. Other
    fields are those of `load_environment`.
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
    seed: int = chz.field(default=0, doc="of the order of samples and of the split")
    task_args: Mapping[str, Any] | None = None
    test_samples: int = chz.field(default=0, doc="samples that are held out for the test set")
    test_task_args: Mapping[str, Any] | None = chz.field(default=None, doc="arguments of the test task")
    scorer_weights: Mapping[str, float] | None = None
    model_roles: Mapping[str, str | Model] | None = None
    custom_reward_fn: CustomRewardFn | None = None

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """The train and the test dataset. Raises what `load_environment` raises."""
        if self.test_samples and self.test_task_args is not None:
            raise EnvironmentConfigError("give test_samples or test_task_args, not both")
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
            self.env_type,
            self.max_samples,
            self.max_turns,
            group_size,
            self.batch_size,
            self.sandbox_type,
            self.sandbox_config,
            self.submit_instruction,
            num_epochs=epochs,
            shuffle=shuffle,
            shuffle_seed=self.seed,
            custom_reward_fn=self.custom_reward_fn,
            scorer_weights=self.scorer_weights,
            model_roles=self.model_roles,
            tokenizer=get_tokenizer(self.model_name_for_tokenizer),
            task_args=task_args,
        )
