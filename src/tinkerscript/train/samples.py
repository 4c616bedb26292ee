"""The samples of a task, dealt out in an order that the seed decides."""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Iterator
from typing import Any

from inspect_tinker_bridge import BridgeError, load_inspect_task
from tinkerscript.config import TaskConfig
from tinkerscript.errors import ConfigError
from tinkerscript.protocol import EpisodeType
from tinkerscript.train.source import PlannedEpisode


class TaskSamples:
    """Train and evaluation samples of one Inspect task, as JSON."""

    def __init__(self, task: TaskConfig, *, seed: int) -> None:
        if not task.name:
            raise ConfigError("task.name is needed to train: give file.py@name or a registered Inspect task")
        self.task = task
        self._train = _load(task.name, task.train_args)
        self._eval = _load(task.name, task.eval_args)
        self._order = self._shuffled_for_ever(random.Random(seed))

    def _shuffled_for_ever(self, rng: random.Random) -> Iterator[dict[str, Any]]:
        while True:
            yield from rng.sample(self._train, len(self._train))

    def train_groups(self, *, step: int, groups: int, group_size: int) -> list[list[PlannedEpisode]]:
        """The next `groups` samples, each as `group_size` planned episodes."""
        samples = itertools.islice(self._order, groups)
        return [
            [self._plan("train", f"step-{step}/group-{i}", sample) for _ in range(group_size)]
            for i, sample in enumerate(samples)
        ]

    def eval_episodes(self, *, label: str, count: int) -> list[PlannedEpisode]:
        """`count` planned episodes that go round the evaluation samples in their order."""
        samples = itertools.islice(itertools.cycle(enumerate(self._eval)), count)
        return [self._plan("eval", f"eval-{label}/sample-{i}", sample) for i, sample in samples]

    def _plan(self, episode_type: EpisodeType, group_id: str, sample: dict[str, Any]) -> PlannedEpisode:
        return PlannedEpisode(episode_type, group_id, {"task": self.task.name, "sample": sample})


def _load(name: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        task = load_inspect_task(name, **args)
    except BridgeError as error:
        raise ConfigError(f"task: {error}") from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"task: {name!r} with {args} raised {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno})"
        ) from error
    samples = [sample.model_dump(mode="json", exclude_none=True) for sample in task.samples]
    if not samples:
        raise ConfigError(f"task.name: {name!r} with {args} has no samples")
    return samples
