"""`tinkerscript train | worker | serve | eval | engine | status`.

Each command imports what it needs when it runs: a worker's machine has no torch, and `status` should not
wait for it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tinkerscript.client import TinkerScriptClient
from tinkerscript.client.settings import client_token
from tinkerscript.errors import TinkerScriptError
from tinkerscript.workers.process import WorkerOptions, run_worker, tasks_with_args

DEFAULT_SERVER = "http://127.0.0.1:10086"
INTERRUPTED = 130


class EpisodeChoice(StrEnum):
    """Which episodes a worker claims."""

    TRAIN = "train"
    EVAL = "eval"
    ANY = "any"


app = typer.Typer(
    name="tinkerscript",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for agents whose rollouts are ordinary programs.",
)


@app.callback()
def _root() -> None:
    """Keeps `tinkerscript COMMAND` a group even with one command."""


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file; docs/config.md lists every key.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, over the file. May be repeated.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to go on with, from its newest checkpoint.")
    ] = None,
    join: Annotated[
        Path | None, typer.Option(help="Folder of a server that is there already (`tinkerscript serve`).")
    ] = None,
) -> None:
    """Train as CONFIG says: server, workers and trainer on this machine, or all in one process."""
    with _clear_errors():
        run = _module("tinkerscript.commands.train", extra="all")
        work = run.train_command(config, override or [], Console(), resume=resume, join=join)
        raise typer.Exit(_run_until_interrupted(work))


@app.command()
def worker(
    script: Annotated[
        Path | None, typer.Argument(help="Python file with a rollout(episode) function.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Inspect task instead: file.py@name or a registered name. May be repeated."),
    ] = None,
    task_args: Annotated[
        list[str] | None, typer.Option(help="Arguments of each task in turn, as a JSON object.")
    ] = None,
    server: Annotated[str, typer.Option(envvar="TINKERSCRIPT_SERVER_URL")] = DEFAULT_SERVER,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 16,
    episode_type: Annotated[EpisodeChoice, typer.Option()] = EpisodeChoice.ANY,
    pool: Annotated[
        str, typer.Option(help="Episodes that this client registered, instead of the trainer's.")
    ] = "",
    allow_discard_timeout: Annotated[
        float, typer.Option(help="Seconds without activity after which a claim lapses.")
    ] = 60.0,
) -> None:
    """Claim episodes from a server and run them, here."""
    with _clear_errors():
        options = WorkerOptions(
            server_url=server,
            script=str(script or ""),
            tasks=tasks_with_args(
                task or [], [_json_object("--task-args", each) for each in task_args or []]
            ),
            concurrency=concurrency,
            episode_type=episode_type.value,
            pool=pool,
            allow_discard_timeout=allow_discard_timeout,
        )
        statistics = run_worker(options)
    Console().print(f"worker done: {statistics}", highlight=False)


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Config of a run: its interchange server, without a trainer.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run whose server goes on.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a trained model, or of any causal model, to serve.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 10086,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
) -> None:
    """Serve a model as an OpenAI-compatible endpoint, or the interchange server of a run by itself."""
    with _clear_errors():
        module = _module("tinkerscript.commands.serve", extra="all")
        if checkpoint is not None and config is None and resume is None:
            work = module.serve_checkpoint(checkpoint, host, port, Console())
        elif checkpoint is None:
            work = module.serve_run(config, resume, Console())
        else:
            _fail("--checkpoint serves a model: give no CONFIG and no --resume beside it")
        raise typer.Exit(_run_until_interrupted(work))


@app.command("eval")
def evaluate(
    task: Annotated[str, typer.Argument(help="Inspect task: file.py@name or a registered name.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a trained model; it is served while the eval runs.")
    ] = None,
    server: Annotated[str, typer.Option(help="Or the URL of a server that serves the model.")] = "",
    task_args: Annotated[str, typer.Option(help="Arguments of the task, as a JSON object.")] = "{}",
    model_roles: Annotated[str, typer.Option(help="Models of other roles, as a JSON object.")] = "{}",
    limit: Annotated[int | None, typer.Option(min=1, help="Samples at most.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Attempts at each sample.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one model call.")] = None,
    max_connections: Annotated[int, typer.Option(min=1, help="Model calls at once.")] = 32,
    sandbox: Annotated[str | None, typer.Option(help="In place of the task's own sandbox.")] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder of the log, for inspect view.")] = Path("logs"),
) -> None:
    """Evaluate a model on an Inspect task, as `inspect eval` does, and write its log."""
    with _clear_errors():
        module = _module("tinkerscript.commands.evaluate", extra="all")
        options = module.EvalOptions(
            task=task,
            checkpoint=checkpoint,
            server=server,
            api_key=client_token() or "none",
            task_args=_json_object("--task-args", task_args),
            model_roles=_json_object("--model-roles", model_roles),
            limit=limit,
            epochs=epochs,
            temperature=temperature,
            max_tokens=max_tokens,
            max_connections=max_connections,
            sandbox=sandbox,
            log_dir=log_dir,
        )
        raise typer.Exit(_run_until_interrupted(module.evaluate_command(options, Console())))


@app.command()
def engine(
    checkpoint: Annotated[str, typer.Option(help="Folder of the model, or `tiny`.")] = "tiny",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Tinker's protocol here; 0 takes a free port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind with --port.")] = "127.0.0.1",
    state_dir: Annotated[
        Path, typer.Option(help="With --port: folder of its sessions and checkpoints.")
    ] = Path("runs/engine"),
    name: Annotated[str, typer.Option(help="With --port: the model's name to clients (its folder).")] = "",
    threads: Annotated[int, typer.Option(min=1, help="With --port: torch threads.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="With --port: sequences decoded together.")] = 128,
    max_runs: Annotated[int, typer.Option(min=1, help="With --port: training runs in memory.")] = 8,
    device: Annotated[str, typer.Option(help="With --port: torch device.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="With --port: auto, float32 or bfloat16 matrix products.")
    ] = "float32",
    link: Annotated[str, typer.Option(help="Sample for the server with this link (its server.json).")] = "",
    link_keys: Annotated[
        Path | None, typer.Option(help="Folder of the link's keys, if it has some (its server.json).")
    ] = None,
    exit_with_parent: Annotated[bool, typer.Option(help="End when standard input closes.")] = False,
) -> None:
    """Serve a model with Tinker's protocol (--port), or sample for a server over its link (--link)."""
    with _clear_errors():
        if (port is None) == (not link):
            _fail("give --port to serve Tinker's protocol, or --link to sample for a server")
        module = _module("tinkerscript.commands.engine", extra="all")
        if port is None:
            work = module.serve_engine(
                checkpoint, link, link_keys=link_keys, exit_with_parent=exit_with_parent
            )
        else:
            options = module.wire_options(
                checkpoint,
                state_dir=state_dir,
                name=name,
                host=host,
                port=port,
                threads=threads,
                max_batch=max_batch,
                max_runs=max_runs,
                device=device,
                dtype=dtype,
            )
            work = module.serve_tinker(options, Console(), exit_with_parent=exit_with_parent)
        raise typer.Exit(_run_until_interrupted(work))


@app.command()
def status(
    server: Annotated[str, typer.Option(envvar="TINKERSCRIPT_SERVER_URL")] = DEFAULT_SERVER,
) -> None:
    """What a server is doing now."""
    with _clear_errors(), TinkerScriptClient(server) as client:
        reply = client.get_engine_status()
    console = Console()
    console.print(
        f"{reply.engine_status}  model {reply.model or '-'}  policy {reply.policy_version}  "
        f"step {reply.global_step}  trainer {'connected' if reply.trainer_connected else 'away'}"
    )
    table = Table("episodes", "registered", "claimed", "ended", "accepted", "failed")
    for kind, counts in reply.episodes.items():
        table.add_row(kind, *(str(value) for value in counts.model_dump().values()))
    console.print(table)


def _module(name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("tinkerscript", "inspect_tinker_bridge")):
            raise
        _fail(f"this command needs {error.name}: pip install 'tinkerscript[{extra}]'")


@contextmanager
def _clear_errors() -> Generator[None]:
    """Errors raised on purpose end the command with one line and exit code 2, not with a traceback."""
    try:
        yield
    except TinkerScriptError as error:
        _fail(str(error))


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        _fail(f"{option}: not valid JSON: {error}: {text}")
    if not isinstance(value, dict):
        _fail(f'{option}: must be a JSON object such as {{"split": "test"}}, got {text}')
    return cast("dict[str, Any]", value)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]error:[/bold red] {escape(message)}", highlight=False
    )
    raise typer.Exit(2)


def _run_until_interrupted(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`; SIGINT and SIGTERM cancel it, and it cleans up before this returns."""

    async def main() -> int:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            print("stopped", file=sys.stderr)
            return INTERRUPTED

    return asyncio.run(main())
