"""The samples of a task, dealt out in an order that the seed decides."""

from __future__ import annotations

import itertools
import random
import traceback
from typing import Any

from inspect_tinker_bridge import BridgeError, load_inspect_task
from inspect_tinker_bridge.samples import sample_to_json
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
        self._shuffled: tuple[int, list[dict[str, Any]]] = (-1, [])
        self._eval = _load(task.name, task.eval_args)
        self._seed = seed
        self.next_position = 0
        """In the endless order of training samples, which the seed decides."""

    def train_groups(self, *, step: int, groups: int, group_size: int) -> list[list[PlannedEpisode]]:
        """The next `groups` samples, each as `group_size` planned episodes."""
        positions = range(self.next_position, self.next_position + groups)
        self.next_position += groups
        return [
            [self.planned_again(f"step-{step}/sample-{position}", position) for _ in range(group_size)]
            for position in positions
        ]

    def planned_again(self, group_id: str, position: int, **more: str) -> PlannedEpisode:
        """An episode of the sample at `position`; `more` gives it the uuid that it had."""
        return self._plan("train", group_id, self._at(position), position=position, **more)

    def payload_at(self, position: int) -> dict[str, Any]:
        """What the episodes of the training sample at `position` are given."""
        return {"task": self.task.name, "sample": self._at(position)}

    def _at(self, position: int) -> dict[str, Any]:
        """Each pass over the samples is a shuffle of its own."""
        number, index = divmod(position, len(self._train))
        if number != self._shuffled[0]:
            rng = random.Random(f"{self._seed}/{number}")
            self._shuffled = number, rng.sample(self._train, len(self._train))
        return self._shuffled[1][index]

    def eval_episodes(self, *, label: str, count: int) -> list[PlannedEpisode]:
        """`count` planned episodes that go round the evaluation samples in their order."""
        samples = itertools.islice(itertools.cycle(enumerate(self._eval)), count)
        return [self._plan("eval", f"eval-{label}/sample-{i}", sample) for i, sample in samples]

    def _plan(
        self, episode_type: EpisodeType, group_id: str, sample: dict[str, Any], **more: Any
    ) -> PlannedEpisode:
        return PlannedEpisode(episode_type, group_id, {"task": self.task.name, "sample": sample}, **more)


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
    samples = [sample_to_json(sample) for sample in task.samples]
    if not samples:
        raise ConfigError(f"task.name: {name!r} with {args} has no samples")
    return samples
