"""What `tinkerscript eval` refuses, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tinkerscript.config import TINY_MODEL
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.train.evaluate import EvalOptions, evaluate

EXAMPLES = Path(__file__).parents[2] / "examples"
ARITHMETIC = f"{EXAMPLES / 'arithmetic.py'}@arithmetic"
CODING = f"{EXAMPLES / 'coding_task.py'}@coding_task"


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (ARITHMETIC, {}, "give one of --checkpoint FOLDER and --server URL"),
        (ARITHMETIC, {"checkpoint": TINY_MODEL, "server": "http://x"}, "give one of --checkpoint"),
        ("nowhere.py@x", {"checkpoint": TINY_MODEL}, "there is no file nowhere.py"),
        (ARITHMETIC, {"checkpoint": EXAMPLES}, "has no config.json"),
        (CODING, {"checkpoint": TINY_MODEL, "sandbox": "nothing"}, "no sandbox provider is called 'nothing'"),
    ],
)
async def test_what_cannot_be_evaluated_is_named(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await evaluate(EvalOptions(task=task, **options), Console())


async def test_a_server_that_is_not_there_is_named() -> None:
    options = EvalOptions(task=ARITHMETIC, server="http://127.0.0.1:9")
    with pytest.raises(ServerUnreachableError, match="no model server answers at http://127"):
        await evaluate(options, Console())
