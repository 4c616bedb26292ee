"""Tinker's groups and datasets over Inspect environments.

Invariant: a builder pickles small, by the way to load its task; a dataset's batches are a fixed function of
its options, so that a run that resumes asks for the same ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inspect_ai.dataset import Sample
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, Trajectory

from inspect_tinker_bridge.env import InspectEnv
from inspect_tinker_bridge.errors import ConversionError, EnvironmentConfigError
from inspect_tinker_bridge.options import EnvOptions
from inspect_tinker_bridge.pool import shared_pool
from inspect_tinker_bridge.rollout_log import SavedRollout
from inspect_tinker_bridge.runner import TaskRunner
from inspect_tinker_bridge.tasks import InspectTaskInfo


@dataclass
class InspectEnvGroupBuilder(EnvGroupBuilder):
    """The group of one sample: `num_envs` episodes that are compared with each other.

    Pickles; the process that unpickles it loads the task once. Single use.
    """

    task: InspectTaskInfo
    sample: Sample
    renderer: Renderer
    num_envs: int
    options: EnvOptions = field(default_factory=EnvOptions)
    batch: int | None = None
    """Index of the batch that the group is of, if it came from a dataset."""

    _runner: TaskRunner | None = field(default=None, init=False, repr=False)
    _envs: list[InspectEnv] = field(default_factory=list["InspectEnv"], init=False, repr=False)

    async def make_envs(self) -> Sequence[Env]:
        """`num_envs` environments that have not started. Waits while another task's runner is in use."""
        if self._runner is None:
            self._runner = await shared_pool().acquire(self.task, self.options.runner)
        made = [
            InspectEnv(self._runner, self.sample, self.renderer, self.options) for _ in range(self.num_envs)
        ]
        self._envs.extend(made)
        return made

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Score what the trainer stopped early; the other episodes have their reward in the last step."""
        envs = [env for env in env_group if isinstance(env, InspectEnv)]
        if len(envs) != len(trajectory_group):
            raise ConversionError(f"{len(trajectory_group)} trajectories, {len(envs)} Inspect environments")
        return list(await asyncio.gather(*(env.finish() for env in envs)))

    async def cleanup(self) -> None:
        """End what still runs and give the runner back. Idempotent."""
        envs, self._envs = self._envs, []
        runner, self._runner = self._runner, None
        try:
            await asyncio.gather(*(env.abandon() for env in envs))
            await self._save(envs)
        finally:
            if runner is not None:
                await shared_pool().release()

    async def _save(self, envs: Sequence[InspectEnv]) -> None:
        log = self.options.rollout_log
        if log is None or not log.wants(self.batch):
            return
        saved = [
            SavedRollout(
                self.task.name, self.batch, env.outcome, env.scored.reward, env.scored.metrics, env.actions
            )
            for env in envs
            if env.outcome is not None and env.scored is not None
        ]
        await asyncio.to_thread(log.save, saved)

    def logging_tags(self) -> list[str]:
        """The task's name, without its package."""
        return [self.task.name.rpartition("/")[2]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None, "_envs": []}


class InspectRLDataset(RLDataset):
    """A task's samples in batches of groups; the last batch may be smaller.

    Epochs follow one another without a gap, each in the dataset's order, or each in an order of its own.
    """

    def __init__(
        self,
        builder: InspectEnvGroupBuilder,
        samples: Sequence[Sample],
        batch_size: int,
        *,
        num_epochs: int = 1,
        shuffle: bool = False,
        shuffle_seed: int = 0,
    ) -> None:
        """`builder` is the pattern of every group. `batch_size` counts samples, one group each."""
        self._builder = builder
        self._samples = list(samples)
        self._batch_size = batch_size
        self._num_epochs = num_epochs
        self._seed = shuffle_seed if shuffle else None
        self._orders: dict[int, list[int]] = {}

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples, in the dataset's order."""
        return self._samples

    @property
    def task(self) -> InspectTaskInfo:
        """The task that the samples are of."""
        return self._builder.task

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """New group builders of one batch. Raises IndexError outside `0 <= index < len(self)`."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self._batch_size
        end = min(start + self._batch_size, len(self._samples) * self._num_epochs)
        return [
            replace(self._builder, sample=self._sample_at(position), batch=index)
            for position in range(start, end)
        ]

    def __len__(self) -> int:
        return -(-len(self._samples) * self._num_epochs // self._batch_size)

    def split(
        self, test_samples: int, *, seed: int = 0, num_envs_per_group: int = 1
    ) -> tuple[InspectRLDataset, InspectRLDataset]:
        """Train and test: `test_samples` samples, drawn by `seed`, only in the test dataset (one epoch).

        `num_envs_per_group` is that of the test groups. Raises EnvironmentConfigError unless both get some.
        """
        if not 0 < test_samples < len(self._samples):
            raise EnvironmentConfigError(
                f"test_samples is {test_samples!r}; each part needs some of {len(self._samples)} samples"
            )
        held_out = set(random.Random(seed).sample(range(len(self._samples)), test_samples))
        parts: tuple[list[Sample], list[Sample]] = ([], [])
        for position, sample in enumerate(self._samples):
            parts[position in held_out].append(sample)
        train = InspectRLDataset(
            self._builder,
            parts[0],
            self._batch_size,
            num_epochs=self._num_epochs,
            shuffle=self._seed is not None,
            shuffle_seed=self._seed or 0,
        )
        builder = replace(self._builder, num_envs=num_envs_per_group)
        return train, InspectRLDataset(builder, parts[1], self._batch_size)

    def _sample_at(self, position: int) -> Sample:
        epoch, at = divmod(position, len(self._samples))
        if self._seed is None:
            return self._samples[at]
        if epoch not in self._orders:
            order = list(range(len(self._samples)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order, **{e: o for e, o in self._orders.items() if e == epoch - 1}}
        return self._samples[self._orders[epoch][at]]
