"""What `tinkerscript eval` refuses before anything starts, and what ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tinkerscript.cli import app
from tinkerscript.commands.evaluate import EvalOptions, evaluate
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.model_folder import TINY_MODEL

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
        (
            CODING,
            {"checkpoint": str(TINY_MODEL), "sandbox": "nothing"},
            "no sandbox provider is called 'nothing'",
        ),
        (ARITHMETIC, {"task_args": {"split": "odd"}}, r"with \{'split': 'odd'\} raised \w+: .*line \d"),
        (
            ARITHMETIC,
            {"model_roles": {"grader": "nobody/x"}},
            "--model-roles: 'grader': 'nobody/x' cannot be",
        ),
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
    ("command", "option", "value", "message"),
    [
        ("eval", "--task-args", "[1]", "--task-args: must be a JSON object"),
        ("eval", "--task-args", "{", "--task-args: not valid JSON"),
        ("eval", "--model-roles", '"x"', "--model-roles: must be a JSON object"),
        ("worker", "--task-args", "[1]", "--task-args: must be a JSON object"),
    ],
)
def test_an_option_that_is_no_json_object_is_named(
    command: str, option: str, value: str, message: str
) -> None:
    task = [ARITHMETIC] if command == "eval" else ["--task", ARITHMETIC]
    result = CliRunner().invoke(app, [command, *task, option, value])
    assert result.exit_code == 2
    assert message in result.stderr
