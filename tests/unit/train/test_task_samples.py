"""Samples of several tasks: dealt by weight, the same each time they are asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tinkerscript.config import EvaluationConfig, RunConfig, WeightedTaskConfig
from tinkerscript.errors import ConfigError
from tinkerscript.train.run import (
    _samples,  # pyright: ignore[reportPrivateUsage]
    not_held_out,
)
from tinkerscript.train.samples import TaskSamples

FILE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig

def samples(name, number):
    return Task(dataset=[Sample(id=f"{name}{i}", input=f"{name} {i}") for i in range(number)])

@task
def few():
    return samples("few", 3)

@task
def many(held_out: bool = False, number: int = 7):
    return samples("held" if held_out else "many", number)

@task
def level(hard):
    return samples("hard", 3 // hard)

@task
def tuned(temperature=0.5):
    return Task(dataset=[Sample(id="s", input="Hi")], config=GenerateConfig(temperature=temperature))

@task
def none():
    return samples("none", 0)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> list[WeightedTaskConfig]:
    path = tmp_path / "tasks.py"
    path.write_text(FILE)
    return [
        WeightedTaskConfig(name=f"{path}@few"),
        WeightedTaskConfig(name=f"{path}@many", eval_args={"held_out": True}, weight=3),
    ]


def ids(samples: TaskSamples, positions: range) -> list[str]:
    return [samples.payload_at(position)["sample"]["id"] for position in positions]


def test_groups_are_dealt_by_weight_and_each_pass_has_every_sample(tasks: list[WeightedTaskConfig]) -> None:
    samples = TaskSamples(tasks, seed=1)
    groups = samples.train_groups(step=1, groups=28, group_size=2)
    counted = Counter(group[0].payload["task"].rpartition("@")[2] for group in groups)
    assert counted == {"few": 7, "many": 21}
    assert samples.next_position == 28
    dealt = [group[0].payload["sample"]["id"] for group in groups]
    many = [name for name in dealt if name.startswith("many")]
    assert [sorted(set(many[i : i + 7])) for i in (0, 7, 14)] == [[f"many{n}" for n in range(7)]] * 3
    assert many[:7] != many[7:14]
    # A run that goes on asks for positions, in whatever order, and gets what it had.
    again = TaskSamples(tasks, seed=1)
    assert ids(again, range(27, -1, -1)) == dealt[::-1]
    assert ids(TaskSamples(tasks, seed=2), range(28)) != dealt


def test_evaluation_goes_round_the_held_out_samples_of_each_task(tasks: list[WeightedTaskConfig]) -> None:
    plans = TaskSamples(tasks, seed=1).eval_episodes(label="before", count=8)
    found = Counter(plan.payload["sample"]["id"] for plan in plans)
    assert found == {"few0": 1, "few1": 1, **{f"held{n}": 1 for n in range(6)}}
    assert {plan.label for plan in plans} == {"before"}


def test_evaluation_asks_each_sample_as_often_as_it_is_told(tasks: list[WeightedTaskConfig]) -> None:
    plans = TaskSamples(tasks[:1], seed=1).eval_episodes(label="before", count=7, attempts=3)
    assert [plan.payload["sample"]["id"] for plan in plans] == ["few0"] * 3 + ["few1"] * 3 + ["few2"]
    assert [plan.group_id[-1] for plan in plans] == ["0"] * 3 + ["1"] * 3 + ["2"]


def test_evaluation_samples_that_train_too_are_counted(tasks: list[WeightedTaskConfig]) -> None:
    samples = TaskSamples(tasks, seed=1)
    assert samples.trained_too(8) == (2, 8)
    assert samples.trained_too(80) == (3, 10)
    warning = not_held_out(samples, EvaluationConfig(episodes=80))
    assert warning.startswith("3 of 10 evaluation samples are trained on too: the score is not held out")
    assert not_held_out(samples, EvaluationConfig(episodes=0)) == ""
    assert not_held_out(samples, EvaluationConfig(episodes=0, every_steps=2, interim_episodes=8)) != ""
    assert not_held_out(TaskSamples(tasks[1:], seed=1), EvaluationConfig()) == ""


def test_what_cannot_be_trained_is_named(tasks: list[WeightedTaskConfig]) -> None:
    with pytest.raises(ConfigError, match=r"task\.name is needed"):
        TaskSamples([], seed=1)
    empty = WeightedTaskConfig(name=tasks[0].name.replace("@few", "@none"))
    with pytest.raises(ConfigError, match="has no samples"):
        TaskSamples([tasks[0], empty], seed=1)
    with pytest.raises(ConfigError, match="no task is registered as 'inspect_evals/nothing'"):
        TaskSamples([WeightedTaskConfig(name="inspect_evals/nothing")], seed=1)


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("many", {"number": 0}, r"task\.eval_args: .*@many' with \{'number': 0\} raised .*no samples"),
        ("many", {"numbers": 3}, r"task\.eval_args: .*numbers"),
        ("level", {}, r"task\.eval_args: the task 'level' of .* missing a required argument: 'hard'"),
        ("level", {"hard": 0}, r"task\.eval_args: .* with \{'hard': 0\} raised ZeroDivisionError"),
    ],
)
def test_what_cannot_be_evaluated_names_the_arguments_of_the_evaluation(
    tasks: list[WeightedTaskConfig], task: str, args: dict[str, Any], message: str
) -> None:
    name = tasks[0].name.replace("@few", f"@{task}")
    trained = {"hard": 1} if task == "level" else {}
    with pytest.raises(ConfigError, match=message):
        TaskSamples([WeightedTaskConfig(name=name, train_args=trained, eval_args=args)], seed=1)


def test_the_runs_seed_decides_the_order_of_its_samples(tasks: list[WeightedTaskConfig]) -> None:
    orders: list[list[str]] = []
    for seed in (1, 1, 2):
        samples = _samples(RunConfig.model_validate({"seed": seed, "task": {"name": tasks[1].name}}))
        assert samples is not None
        orders.append(ids(samples, range(14)))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_a_task_that_asks_for_the_most_probable_token_is_known_before_the_run(
    tasks: list[WeightedTaskConfig],
) -> None:
    name = tasks[0].name.replace("@few", "@tuned")
    for temperature, greedy in ((0.0, ["tasks.py@tuned"]), (0.5, [])):
        task = WeightedTaskConfig(name=name, train_args={"temperature": temperature})
        assert TaskSamples([task], seed=1).greedy == greedy
