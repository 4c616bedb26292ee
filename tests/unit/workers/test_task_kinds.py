"""Which kind a task's name is of, and what loading one says when it cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tinkerscript.config import WeightedTaskConfig
from tinkerscript.errors import ConfigError
from tinkerscript.train.samples import TaskSamples
from tinkerscript.workers import base_task
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample, kind_of, load_task

FILE = """
from tinkerscript.workers import Task

class Halves(Task):
    def __init__(self, size=3):
        self.size = size

    def samples(self, *, held_out):
        return [{"id": n, "input": f"{n}/2", "target": str(n / 2)} for n in range(10 * held_out, self.size)]

    async def rollout(self, sample, model):
        return 1.0

NUMBER = 1

def twins():
    class Twins(Halves):
        def samples(self, *, held_out):
            return [{"id": 1, "input": "a"}, {"id": "1", "input": "b"}]
    return Twins()

def nothing():
    return 7

def broken():
    raise ValueError("no data today")
"""


class Weather(Task):
    """A kind of another package."""

    def __init__(self, place: str, /, *, days: int = 2) -> None:
        self.place, self.days = place, days

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        return [{"id": day, "input": self.place} for day in range(self.days)]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> float:
        raise NotImplementedError


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the kind `weather`, and one whose own packages are missing."""
    found = [
        EntryPoint("weather", f"{__name__}:Weather", base_task.ENTRY_POINTS),
        EntryPoint("tides", "no_such_package.tides:Tides", base_task.ENTRY_POINTS),
    ]
    monkeypatch.setattr(base_task, "entry_points", lambda group: found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tasks.py@sums", "inspect"),
        ("tasks.py", "inspect"),
        ("inspect_evals/gsm8k", "inspect"),
        ("/odd:folder/tasks.py@sums", "inspect"),
        ("/odd:folder/tasks.py:Sums", "own"),
        ("my.package:Sums", "own"),
        ("weather:Lund", "weather"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_name_says_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.usefixtures("installed")
def test_another_packages_kind_gets_its_name_and_its_arguments() -> None:
    task = load_task("weather:Lund", {"days": 4})
    assert isinstance(task, Weather)
    assert (task.place, task.days, task.task_id) == ("Lund", 4, "weather:Lund")
    with pytest.raises(ConfigError, match=r"'weather:Lund'.*'hours'; it accepts days"):
        load_task("weather:Lund", {"hours": 4})
    with pytest.raises(
        ConfigError, match=r"'tides:Lund' needs the package 'no_such_package': pip install 'tides'"
    ):
        load_task("tides:Lund", {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("astrology:http://stars", r"no kind of task 'astrology'; there are .*weather, module:NAME"),
        ("no_such_module:Task", r"needs the package 'no_such_module'.*kinds of tasks: .*weather"),
        ("{file}:Missing", r"no class or function 'Missing'"),
        ("{file}:NUMBER", r"no class or function 'NUMBER'"),
        ("{file}:nothing", r"made a int, not a tinkerscript.workers.Task"),
        ("elsewhere.py:Task", r"no script at .*elsewhere.py"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_name_that_cannot_be_loaded_says_what_helps(name: str, said: str, file: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_task(name.format(file=file), {})


def test_a_task_of_the_users_own_trains_on_its_samples_and_evaluates_on_others(file: str) -> None:
    config = WeightedTaskConfig(name=f"{file}:Halves", train_args={"size": 4}, eval_args={"size": 12})
    samples = TaskSamples([config], seed=1)
    (group,) = samples.train_groups(step=1, groups=1, group_size=2)
    assert group[0].payload["task"] == "mine.py:Halves"
    assert {samples.payload_at(n)["sample"]["id"] for n in range(4)} == {0, 1, 2, 3}
    assert [plan.payload["sample"]["id"] for plan in samples.eval_episodes(label="x", count=3)] == [
        10,
        11,
        10,
    ]
    assert samples.trained_too(2) == (0, 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("twins", r"needs a unique id for each sample, not \['1'\]"),
        ("broken", r"raised ValueError: no data today \(.*mine.py, line \d+\)"),
    ],
)
def test_a_task_whose_samples_cannot_be_had_says_why(file: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TaskSamples([WeightedTaskConfig(name=f"{file}:{name}")], seed=1)
