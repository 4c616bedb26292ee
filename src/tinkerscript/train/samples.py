"""Loading a task that the user names: whatever goes wrong there is one line that says where.

The samples of a task, dealt out in an order that the seed decides.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_tinker_bridge import BridgeError, InspectTaskInfo, load_inspect_task
from inspect_tinker_bridge.tasks import sample_to_json
from tinkerscript.config import WeightedTaskConfig
from tinkerscript.errors import ConfigError
from tinkerscript.train.source import PlannedEpisode


def load_task(name: str, args: Mapping[str, Any]) -> InspectTaskInfo:
    """The task, made with `args`. Raises ConfigError, also for what the task's own code raises."""
    try:
        return load_inspect_task(name, **args)
    except BridgeError as error:
        raise ConfigError(f"task: {error}") from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"task: {name!r} with {dict(args)} raised {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno})"
        ) from error


class TaskSamples:
    """Train and evaluation samples of the tasks of a run, as JSON."""

    def __init__(self, tasks: Sequence[WeightedTaskConfig], *, seed: int) -> None:
        """Raises ConfigError for a task that cannot be loaded or has no samples, or no task at all."""
        if not tasks:
            raise ConfigError("task.name is needed to train: give file.py@name or a registered Inspect task")
        self.tasks = [task.name for task in tasks]
        # An order of its own for each task; of the first it is that of a run of one task.
        self._decks = [
            _ShuffledSamples(_load(task.name, task.train_args), f"{seed}/{i}" if i else str(seed))
            for i, task in enumerate(tasks)
        ]
        self._eval = [_load(task.name, task.eval_args) for task in tasks]
        self._turns = _Turns([task.weight for task in tasks])
        self.next_position = 0
        """In the endless order of training samples, which the seed and the weights decide."""

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
        return PlannedEpisode("train", group_id, self.payload_at(position), position=position, **more)

    def payload_at(self, position: int) -> dict[str, Any]:
        """What the episodes of the training sample at `position` are given."""
        task, turn = self._turns.at(position)
        return {"task": self.tasks[task], "sample": self._decks[task].at(turn)}

    def eval_episodes(self, *, label: str, count: int) -> list[PlannedEpisode]:
        """`count` planned episodes that go round each task's evaluation samples in their order."""
        planned: list[PlannedEpisode] = []
        for position in range(count):
            task, turn = self._turns.at(position)
            payload = {"task": self.tasks[task], "sample": self._eval[task][turn % len(self._eval[task])]}
            number = position if len(self.tasks) > 1 else turn % len(self._eval[task])
            planned.append(PlannedEpisode("eval", f"eval-{label}/sample-{number}", payload))
        return planned

    def trained_too(self, count: int) -> tuple[int, int]:
        """How many samples of an evaluation of `count` episodes train as well, and of how many samples.

        Of one task, samples that differ in nothing but their id are the same.
        """
        trained = {
            (task, _content(sample))
            for task, deck in zip(self.tasks, self._decks, strict=True)
            for sample in deck.samples
        }
        plans = self.eval_episodes(label="", count=count)
        asked = {(plan.payload["task"], _content(plan.payload["sample"])) for plan in plans}
        return len(asked & trained), len(asked)


def _content(sample: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in sample.items() if name != "id"}, sort_keys=True)


class _ShuffledSamples:
    """One task's samples without an end: each pass over them is a shuffle of its own."""

    def __init__(self, samples: list[dict[str, Any]], seed: str) -> None:
        self.samples = samples
        self._seed = seed
        self._shuffled: tuple[int, list[dict[str, Any]]] = (-1, [])

    def at(self, turn: int) -> dict[str, Any]:
        """The sample of the task's `turn`, from 0."""
        number, index = divmod(turn, len(self.samples))
        if number != self._shuffled[0]:
            rng = random.Random(f"{self._seed}/{number}")
            self._shuffled = number, rng.sample(self.samples, len(self.samples))
        return self._shuffled[1][index]


class _Turns:
    """Whose turn each position is. Always the task that is furthest behind its share (Sainte-Lague)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._taken = [0] * len(weights)
        self._dealt: list[tuple[int, int]] = []

    def at(self, position: int) -> tuple[int, int]:
        """The task's index, and how many turns it has had before."""
        while len(self._dealt) <= position:
            ahead = [(taken + 0.5) / weight for taken, weight in zip(self._taken, self._weights, strict=True)]
            task = ahead.index(min(ahead))
            self._dealt.append((task, self._taken[task]))
            self._taken[task] += 1
        return self._dealt[position]


def _load(name: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    samples = [sample_to_json(sample) for sample in load_task(name, args).samples]
    if not samples:
        raise ConfigError(f"task.name: {name!r} with {args} has no samples")
    return samples
