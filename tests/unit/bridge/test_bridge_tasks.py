"""Loading of tasks in every form, and from scores to rewards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import match

from inspect_tinker_bridge import (
    InvalidTaskError,
    TaskArgumentsError,
    TaskError,
    TaskNotFoundError,
    load_inspect_task,
)
from inspect_tinker_bridge.conversion import sample_digest

ONE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser

@task
def counting(top: int = 2):
    return Task(dataset=[Sample(input=str(n)) for n in range(top)])
"""
TWO = ONE + "\n@task\ndef other():\n    return Task(dataset=[Sample(input='x')])\n"


@task
def plain(top: int = 2) -> Task:
    return Task(dataset=[Sample(input=str(n)) for n in range(top)], scorer=match(), sandbox="local")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.py").write_text(ONE, encoding="utf-8")
    (tmp_path / "two.py").write_text(TWO, encoding="utf-8")
    (tmp_path / "none.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "wrong.py").write_text("def (:\n", encoding="utf-8")
    return tmp_path


def test_a_task_function_gives_samples_scorers_and_sandbox() -> None:
    info = load_inspect_task(plain, top=3)
    assert [(sample.id, sample.input) for sample in info.samples] == [(1, "0"), (2, "1"), (3, "2")]
    assert (info.name, info.sandbox_type, len(info.scorers)) == ("plain", "local", 1)


def test_each_load_has_a_task_of_its_own() -> None:
    mine = Task(dataset=[Sample(input="x")])
    first, second = load_inspect_task(mine), load_inspect_task(mine)
    assert first.task is not second.task is not mine
    assert first.fresh_task() is not first.task


def test_a_file_with_one_task_needs_no_name(folder: Path) -> None:
    for spec in (f"{folder}/one.py", f"{folder}/one.py@counting"):
        assert len(load_inspect_task(spec, top=5).samples) == 5
    assert load_inspect_task(f"{folder}/two.py@other").samples[0].input == "x"


def test_a_registered_name_is_found() -> None:
    assert load_inspect_task("plain").name == "plain"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("two.py", r"more than one task; name one of: .*two.py@counting, .*two.py@other"),
        ("two.py@missing", r"no task 'missing'; name one of: .*two.py@counting, .*two.py@other"),
        ("none.py", "no function decorated with @task"),
        ("wrong.py", r"wrong\.py is not valid Python"),
        ("absent.py", r"there is no file .*absent.py; .* contains none.py, one.py, two.py"),
        ("absent/one.py@counting", "absent does not exist"),
    ],
)
def test_what_does_not_exist_is_named_beside_what_does(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_inspect_task(f"{folder}/{spec}")


def test_an_unknown_registered_name_lists_the_near_ones_first() -> None:
    """However many come before them by name."""
    for number in range(40):
        task(name=f"a_{number}")(lambda: Task())
    with pytest.raises(TaskNotFoundError, match=r"registered as 'plane'.*registered tasks: plain, "):
        load_inspect_task("plane")


def test_arguments_that_the_task_does_not_take_are_refused(folder: Path) -> None:
    for spec in (plain, "plain", f"{folder}/one.py@counting"):
        with pytest.raises(TaskArgumentsError, match=r"depth.*it accepts top"):
            load_inspect_task(spec, depth=1)
    with pytest.raises(TaskArgumentsError, match="already a Task"):
        load_inspect_task(Task(dataset=[Sample(input="x")]), top=1)


def test_duplicate_ids_are_refused_also_between_given_and_made_ones() -> None:
    for samples in (
        [Sample(input="x", id=1), Sample(input="y", id="1")],
        [Sample(input="x", id=2), Sample(input="y")],
    ):
        with pytest.raises(InvalidTaskError, match="two samples with the id"):
            load_inspect_task(Task(dataset=samples))


def test_what_is_not_a_task_is_refused() -> None:
    with pytest.raises(InvalidTaskError, match="returned a dict"):
        load_inspect_task(dict)


def test_episodes_without_tinker_import_neither_tinker_nor_tinkerscript() -> None:
    code = (
        "import sys, inspect_tinker_bridge as b; b.TaskRunner\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'tinker', 'tinker_cookbook', 'torch',"
        " 'transformers', 'tinkerscript'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_digest_is_of_the_problem_and_of_nothing_that_differs_between_machines() -> None:
    def problem(text: str = "hi", folder: str = "/home/a", **more: object) -> str:
        metadata = {"file": f"{folder}/data.csv", "of": {1: (2,), "s": {"x", "y"}}, "odd": object(), **more}
        return sample_digest(Sample(input=[ChatMessageUser(content=text)], metadata=metadata, setup=folder))

    assert problem() == problem(folder="/srv/b")
    others = {problem("ho"), problem(of={1: [2], "s": {"x", "y"}}), problem(of={"1": (2,), "s": {"x", "y"}})}
    assert len(others | {problem()}) == 4
