"""`tinkerscript eval`: what it refuses first, and a task of the user's own against a model at a URL."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outside_chat import OutsideChat, scripted_chat
from tinkerscript.cli import app
from tinkerscript.commands.evaluate import EvalOptions, evaluate, evaluate_command
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.model_folder import TINY_MODEL

# Refusals


EXAMPLES = Path(__file__).parents[3] / "examples"
ARITHMETIC = f"{EXAMPLES / 'arithmetic.py'}@arithmetic"
CODING = f"{EXAMPLES / 'coding_task.py'}@coding_task"


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (ARITHMETIC, {}, "give either --checkpoint FOLDER or --server URL"),
        (ARITHMETIC, {"checkpoint": str(TINY_MODEL), "server": "http://x"}, "give either --checkpoint"),
        ("nowhere.py@x", {"checkpoint": str(TINY_MODEL)}, "there is no file nowhere.py"),
        (ARITHMETIC, {"checkpoint": str(EXAMPLES)}, "has no config.json"),
        (CODING, {"checkpoint": str(TINY_MODEL), "sandbox": "no"}, "no sandbox provider is called 'no'"),
        (ARITHMETIC, {"task_args": {"split": "odd"}}, r"with \{'split': 'odd'\} raised \w+: .*line \d"),
        (ARITHMETIC, {"model_roles": {"grader": "nobody/x"}}, "'grader': 'nobody/x' cannot be"),
        (ARITHMETIC, {"model_roles": {"grader": 3}}, "--model-roles: the model of 'grader' must be a name"),
    ],
)
async def test_what_cannot_be_evaluated_is_named(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await evaluate(EvalOptions(task=task, **options), Console())


async def test_a_server_that_is_not_there_is_named() -> None:
    options = EvalOptions(task=ARITHMETIC, server="http://127.0.0.1:9")
    with pytest.raises(ServerUnreachableError, match="no model server answers at http://127"):
        await evaluate(options, Console())


@pytest.mark.parametrize(
    ("words", "value", "message"),
    [
        ("eval t.py@t --task-args", "{", "--task-args: not valid JSON"),
        ("eval t.py@t --model-roles", '"x"', "--model-roles: must be a JSON object"),
        ("worker --task t.py@t --task-args", "[1]", "--task-args: must be a JSON object"),
    ],
)
def test_an_option_that_is_no_json_object_is_named(words: str, value: str, message: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), value])
    assert result.exit_code == 2
    assert message in result.stderr


# A task of the user's own


FILE = """
from tinkerscript.workers import Task, named_scores

class Echo(Task):
    def __init__(self, words=("one", "two", "three")):
        self.words = words

    def samples(self, *, held_out):
        return [{"id": word, "input": word} for word in self.words if held_out]

    async def rollout(self, sample, model):
        said = await model.ask([{"role": "user", "content": sample["input"]}])
        if said == "three":
            raise ValueError("three is no word")
        return named_scores(len(said) - 3, {"long": len(said) > 3}, metrics={"letters": len(said)})
"""


@pytest.fixture
async def model() -> AsyncIterator[OutsideChat]:
    """One that says what it is told."""
    async with scripted_chat(lambda messages: str(messages[-1]["content"])) as model:
        model.models = ["parrot"]
        yield model


@pytest.fixture
def options(tmp_path: Path, model: OutsideChat) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(FILE)
    server = model.url.removesuffix("/v1")
    return {"task": f"{tmp_path / 'mine.py'}:Echo", "server": server, "log_dir": tmp_path / "logs"}


async def evaluated(options: dict[str, Any]) -> tuple[int, str]:
    screen = StringIO()
    code = await evaluate_command(EvalOptions(**options), Console(file=screen, width=100))
    return code, screen.getvalue()


async def test_each_attempt_is_scored_and_written(
    options: dict[str, Any], model: OutsideChat, tmp_path: Path
) -> None:
    more = {"task_args": {"words": ["fourth", "six"]}, "epochs": 2, "temperature": 0.5, "api_key": "k"}
    code, screen = await evaluated(options | more)
    assert code == 0
    assert "mine.py:Echo: 4 episodes scored, 0 failed" in screen
    rows = dict(re.findall(r"│ (\S+) +│ +(\S+) +│", screen))
    assert rows == {"reward": "1.500", "score/long": "0.500", "letters": "4.500"}
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["id"], line["epoch"], line["reward"]) for line in lines] == [
        *(("fourth", 0, 3.0), ("fourth", 1, 3.0), ("six", 0, 0.0), ("six", 1, 0.0))
    ]
    assert {(ask["model"], ask["temperature"]) for ask in model.requests} == {("parrot", 0.5)}
    assert model.keys == {"Bearer k"}


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ('raise ValueError("three is no word")', "ValueError: three is no word"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "not NoneType"),
    ],
)
async def test_what_raises_has_failed(
    options: dict[str, Any], tmp_path: Path, ends: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(FILE.replace('raise ValueError("three is no word")', ends))
    code, screen = await evaluated(options)
    assert code == 1
    assert "mine.py:Echo: 2 episodes scored, 1 failed" in screen
    assert reason in screen
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    failed = [json.loads(line) for line in log.read_text().splitlines() if "error" in line]
    assert [(line["id"], "reward" in line) for line in failed] == [("three", False)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sandbox": "docker"}, "--model-roles and --sandbox need an Inspect task"),
        ({"task_args": {"words": []}}, "has no samples"),
        ({"task_args": {"letters": 3}}, "it accepts words"),
    ],
)
async def test_wrong_options_are_named(options: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await evaluated(options | more)
