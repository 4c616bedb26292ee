"""`TaskSamples`: the training and evaluation samples of a run's tasks.

A position's sample depends only on the seed and the weights.
"""

from __future__ import annotations

import json
import random
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tinkerscript.config import WeightedTaskConfig
from tinkerscript.errors import ConfigError
from tinkerscript.train.curriculum import Curriculum
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.workers.base_task import Task, load_task

# Ends the search if a curriculum skips everything.
MAX_PASSED_OVER = 10_000


def usable_task(name: str, args: Mapping[str, Any], *, setting: str = "task", sandbox: str = "") -> Task:
    """Raises ConfigError, also for the task's own errors."""
    try:
        return load_task(name, args, sandbox=sandbox)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except Exception as error:
        raise _own_error(setting, name, args, error) from error


def _own_error(setting: str, name: str, args: Mapping[str, Any], error: Exception) -> ConfigError:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"{setting}: {name!r} with {dict(args)} raised {type(error).__name__}: {error} "
        f"({where.filename}, line {where.lineno})"
    )


class TaskSamples:
    curriculum: Curriculum | None = None

    def __init__(self, tasks: Sequence[WeightedTaskConfig], *, seed: int) -> None:
        """Raises ConfigError for a task that fails to load or has no samples."""
        if not tasks:
            raise ConfigError("task.name is needed to train: see docs/environments.md")
        loaded = [usable_task(task.name, task.train_args, sandbox=task.sandbox) for task in tasks]
        self.tasks = [task.task_id for task in loaded]
        self.greedy = [task.task_id for task in loaded if task.temperature == 0]
        if len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"tasks: two have the same file name and task name: {', '.join(self.tasks)}")
        # The first task has the order of a single-task run.
        self._train = [
            _ShuffledSamples(
                _samples(task, given.train_args, held_out=False), f"{seed}/{i}" if i else str(seed)
            )
            for i, (task, given) in enumerate(zip(loaded, tasks, strict=True))
        ]
        self._eval = [
            _samples(
                task
                if given.eval_args == given.train_args
                else usable_task(given.name, given.eval_args, setting="task.eval_args"),
                given.eval_args,
                held_out=True,
            )
            for task, given in zip(loaded, tasks, strict=True)
        ]
        self._schedule = _WeightedSchedule([task.weight for task in tasks])
        self.next_position = 0
        self.again = list[int]()
        """Earlier positions to ask first, because their groups were given up."""

    def train_groups(self, *, step: int, groups: int, group_size: int) -> list[list[PlannedEpisode]]:
        positions, self.again = self.again[:groups], self.again[groups:]
        positions += [self._next_position() for _ in range(groups - len(positions))]
        return [
            [self.planned_again(f"step-{step}/sample-{position}", position) for _ in range(group_size)]
            for position in positions
        ]

    def _next_position(self) -> int:
        for _ in range(MAX_PASSED_OVER):
            position, self.next_position = self.next_position, self.next_position + 1
            if self.curriculum is None or self.curriculum.admits(position, self.payload_at(position)):
                return position
        return self.next_position - 1

    def planned_again(self, group_id: str, position: int, **more: str) -> PlannedEpisode:
        return PlannedEpisode("train", group_id, self.payload_at(position), position=position, **more)

    def payload_at(self, position: int) -> dict[str, Any]:
        task, index = self._schedule.at(position)
        return {"task": self.tasks[task], "sample": self._train[task].at(index)}

    def eval_episodes(self, *, label: str, count: int, attempts: int = 1) -> list[PlannedEpisode]:
        """Cycle through each task's samples, `attempts` of each in a row."""
        planned: list[PlannedEpisode] = []
        for place in range(count):
            position = place // attempts
            task, index = self._schedule.at(position)
            index %= len(self._eval[task])
            payload = {"task": self.tasks[task], "sample": self._eval[task][index]}
            number = position if len(self.tasks) > 1 else index
            planned.append(PlannedEpisode("eval", f"eval-{label}/sample-{number}", payload, label=label))
        return planned

    def trained_too(self, count: int) -> tuple[int, int]:
        """Return how many evaluation samples also train, and how many there are."""
        trained = {
            (task, _content(sample))
            for task, shuffled in zip(self.tasks, self._train, strict=True)
            for sample in shuffled.samples
        }
        plans = self.eval_episodes(label="", count=count)
        evaluated = {(plan.payload["task"], _content(plan.payload["sample"])) for plan in plans}
        return len(evaluated & trained), len(evaluated)


def _content(sample: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in sample.items() if name != "id"}, sort_keys=True)


class _ShuffledSamples:
    def __init__(self, samples: list[dict[str, Any]], seed: str) -> None:
        self.samples = samples
        self._seed = seed
        self._shuffled: tuple[int, list[dict[str, Any]]] = (-1, [])

    def at(self, index: int) -> dict[str, Any]:
        number, offset = divmod(index, len(self.samples))
        if number != self._shuffled[0]:
            rng = random.Random(f"{self._seed}/{number}")
            self._shuffled = number, rng.sample(self.samples, len(self.samples))
        return self._shuffled[1][offset]


class _WeightedSchedule:
    """Gives each position to the task furthest behind its share (Sainte-Laguë)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._taken = [0] * len(weights)

        self._positions: list[tuple[int, int]] = []

    def at(self, position: int) -> tuple[int, int]:
        """(task, index among its samples)"""
        while len(self._positions) <= position:
            ahead = [(taken + 0.5) / weight for taken, weight in zip(self._taken, self._weights, strict=True)]
            task = ahead.index(min(ahead))
            self._positions.append((task, self._taken[task]))
            self._taken[task] += 1
        return self._positions[position]


def _samples(task: Task, args: dict[str, Any], *, held_out: bool) -> list[dict[str, Any]]:
    setting = "task.eval_args" if held_out else "task"
    try:
        samples = [dict(sample) for sample in task.samples(held_out=held_out)]
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except Exception as error:
        raise _own_error(setting, task.task_id, args, error) from error
    if not samples:
        raise ConfigError(f"{setting}: {task.task_id!r} with {args} has no samples")
    for sample in samples:
        try:
            json.dumps(sample)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{setting}: the sample {sample.get('id')!r} of {task.task_id!r} is not JSON and cannot be "
                f"sent to a worker: {error}"
            ) from error
    ids = Counter(str(sample.get("id")) for sample in samples)
    repeated = [name for name, count in ids.items() if count > 1 or name == "None"]
    if repeated:
        raise ConfigError(
            f"{setting}: {task.task_id!r} needs a unique id for each sample, not {repeated[:5]}"
        )
    return samples
