"""What `tinkerscript eval` refuses before anything starts, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from tinkerscript.cli import app
from tinkerscript.commands import evaluate as module
from tinkerscript.commands.evaluate import EvalOptions, evaluate
from tinkerscript.commands.serve import Served
from tinkerscript.errors import ConfigError, ServerUnreachableError, WorkerError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.processes.children import ServerAddress
from tinkerscript.processes.supervisor import Supervisor

EXAMPLES = Path(__file__).parents[3] / "examples"
ARITHMETIC = f"{EXAMPLES / 'arithmetic.py'}@arithmetic"
CODING = f"{EXAMPLES / 'coding_task.py'}@coding_task"


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (ARITHMETIC, {}, "give one of --checkpoint FOLDER and --server URL"),
        (ARITHMETIC, {"checkpoint": str(TINY_MODEL), "server": "http://x"}, "give one of --checkpoint"),
        ("nowhere.py@x", {"checkpoint": str(TINY_MODEL)}, "there is no file nowhere.py"),
        (ARITHMETIC, {"checkpoint": str(EXAMPLES)}, "has no config.json"),
        (
            CODING,
            {"checkpoint": str(TINY_MODEL), "sandbox": "nothing"},
            "no sandbox provider is called 'nothing'",
        ),
        (
            ARITHMETIC,
            {"task_args": {"split": "odd"}},
            r"with \{'split': 'odd'\} raised \w+: .*line \d",
        ),
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


class DyingEngine(Supervisor):
    """Its engine turns out not to load when the model is asked for the first time."""

    def __init__(self) -> None:
        super().__init__(max_restarts=0, note=print)
        self.asked = asyncio.Event()

    async def failed(self) -> NoReturn:
        await self.asked.wait()
        raise WorkerError("engine ended (exit code 1): no weights in the folder")


async def test_an_engine_that_cannot_load_ends_the_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = DyingEngine()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def never(request: web.Request) -> web.Response:
        supervisor.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = web.Application()
    server.router.add_get("/v1/models", models)
    server.router.add_post("/v1/chat/completions", never)
    runner = web.AppRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    @asynccontextmanager
    async def served(*_: object) -> AsyncGenerator[Served]:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield Served("tiny", ServerAddress(url, "", None), supervisor)

    monkeypatch.setattr(module, "served_checkpoint", served)
    options = EvalOptions(task=ARITHMETIC, checkpoint=str(TINY_MODEL), limit=1, log_dir=tmp_path)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(WorkerError, match="no weights in the folder"):
                await evaluate(options, Console())
    finally:
        await runner.cleanup()
