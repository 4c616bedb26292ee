"""`tinkerscript eval` on a task of the user's own, against a model at a URL."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from tinkerscript.commands.evaluate import EvalOptions, evaluate_command
from tinkerscript.errors import ConfigError

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
async def model() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a model that says what it is told, and what it was asked."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json() | {"key": request.headers["Authorization"]})
        message = {"role": "assistant", "content": asked[-1]["messages"][-1]["content"]}
        return web.json_response({"choices": [{"index": 0, "message": message}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "parrot"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()


@pytest.fixture
def options(tmp_path: Path, model: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(FILE)
    return {"task": f"{tmp_path / 'mine.py'}:Echo", "server": model[0], "log_dir": tmp_path / "logs"}


async def evaluated(options: dict[str, Any]) -> tuple[int, str]:
    screen = StringIO()
    code = await evaluate_command(EvalOptions(**options), Console(file=screen, width=100))
    return code, screen.getvalue()


async def test_each_attempt_is_scored_and_written_with_its_name(
    options: dict[str, Any], model: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    more = {"task_args": {"words": ["fourth", "six"]}, "epochs": 2, "temperature": 0.5, "api_key": "k"}
    code, screen = await evaluated(options | more)
    assert code == 0
    assert "mine.py:Echo: 4 episodes scored, 0 failed" in screen
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in screen.splitlines() if "│" in line
    }
    assert rows == {"reward": "1.500", "score/long": "0.500", "letters": "4.500"}
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["id"], line["epoch"], line["reward"]) for line in lines] == [
        *(("fourth", 0, 3.0), ("fourth", 1, 3.0), ("six", 0, 0.0), ("six", 1, 0.0))
    ]
    assert {(ask["model"], ask["temperature"], ask["key"]) for ask in model[1]} == {
        ("parrot", 0.5, "Bearer k")
    }


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ('raise ValueError("three is no word")', "ValueError: three is no word"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "not NoneType"),
    ],
)
async def test_a_rollout_that_raises_is_a_failure_and_not_averaged(
    options: dict[str, Any], tmp_path: Path, ends: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(FILE.replace('raise ValueError("three is no word")', ends))
    code, screen = await evaluated(options)
    assert code == 1
    assert "mine.py:Echo: 2 episodes scored, 1 failed" in screen
    assert "the first failure: " in screen
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
async def test_what_cannot_be_evaluated_is_named(
    options: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        await evaluated(options | more)
