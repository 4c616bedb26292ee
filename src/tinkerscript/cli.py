"""The command line: `tinkerscript init | train | view | show | worker | serve | eval | engine | status`.

Owns the options, and what a user sees of an error: one line and exit code 2, or 1 where a restart may help.

Invariant: this module imports typer and nothing heavier. Each command imports what it runs, so that `--help`
and a bare install need no more; a missing package names the extra that installs it.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from tinkerscript.commands.control import app as control
from tinkerscript.dashboard.plain_text import one_line, plain
from tinkerscript.errors import ConfigError, StoreError, TinkerScriptError, WorkerError

if TYPE_CHECKING:
    from rich.console import Console

CANNOT_RUN = 2
"""Exit code for what the user has to change; a supervisor does not restart such a process."""


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
    rich_markup_mode=None,  # Formatting help with rich would take longer than everything else.
    help="Reinforcement learning for agents whose rollouts are ordinary programs.",
)


app.add_typer(control)


def _url(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{value!r} must start with http:// or https://")
    return value


Server = Annotated[
    str,
    typer.Option(
        envvar="TINKERSCRIPT_SERVER_URL",
        help="URL of the interchange server.",
        show_default="this machine",
        callback=_url,
    ),
]
ExitWithParent = Annotated[bool, typer.Option(hidden=True, help="End when standard input closes.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from tinkerscript import __version__

        typer.echo(f"tinkerscript {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Keeps `tinkerscript COMMAND` a group even with one command."""


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file; docs/config.md lists every key.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.sub=value, overrides the file. Repeatable.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to resume from its newest checkpoint.")
    ] = None,
    join: Annotated[
        Path | None, typer.Option(help="Folder of a server that runs already (`tinkerscript serve`).")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would run where, and start nothing.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the run's page in a browser.")] = False,
) -> None:
    """Train a model as CONFIG says.

    Starts the server, the workers and the trainer on this machine, or all in one process.
    """
    with _one_line_errors():
        if plan:
            with _extra("server"):
                from tinkerscript.commands.plan import print_plan
            print_plan(config, override or [], _console())
            return
        with _extra("all"):
            from tinkerscript.commands.train import follow_command, is_follower, train_command
        if is_follower(config, override or [], resume=resume, join=join):
            follow_command()
            return
        _run(train_command(config, override or [], _console(), resume=resume, join=join, opens=open_))


@app.command()
def worker(
    script: Annotated[
        Path | None, typer.Argument(help="Python file with a rollout(episode) function.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="An Inspect task instead: file.py@name or a registered name. Repeatable."),
    ] = None,
    task_args: Annotated[
        list[str] | None, typer.Option(help="Arguments of each task in turn, as a JSON object.")
    ] = None,
    server: Server = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at a time.")] = 16,
    episode_type: Annotated[EpisodeChoice, typer.Option(help="Episodes to claim.")] = EpisodeChoice.ANY,
    pool: Annotated[
        str, typer.Option(help="Claim the episodes that this client registered, not the trainer's.")
    ] = "",
    allow_discard_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds without activity after which a claim's lease expires.")
    ] = 60.0,
    client_uuid: Annotated[
        str, typer.Option(help="Name of this worker at the server.", show_default="a new uuid")
    ] = "",
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run a server's episodes on this machine."""
    _log_to_stderr()
    with _one_line_errors(WorkerError if exit_with_parent else TinkerScriptError):
        from tinkerscript.client.settings import DEFAULT_SERVER_URL
        from tinkerscript.workers.worker import WorkerOptions, run_worker, tasks_with_args

        arguments = [_json_object("--task-args", each) for each in task_args or []]
        options = WorkerOptions(
            server_url=server or DEFAULT_SERVER_URL,
            script=str(script or ""),
            tasks=tasks_with_args(task or [], arguments),
            concurrency=concurrency,
            client_uuid=client_uuid or None,
            episode_type=episode_type.value,
            pool=pool,
            allow_discard_timeout=allow_discard_timeout,
            exit_with_parent=exit_with_parent,
        )
        run_worker(options)


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Config of a run: serve its episodes, without a trainer.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run whose server to start again.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a trained model, or of any causal model, to serve.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --checkpoint; 0: a free port.")] = 10086,
    host: Annotated[str, typer.Option(help="Address to bind, with --checkpoint.")] = "127.0.0.1",
    max_restarts: Annotated[int, typer.Option(min=0, hidden=True, help="With --checkpoint.")] = 10,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve a model, or the episodes of a run.

    A model (--checkpoint) becomes an OpenAI-compatible endpoint; CONFIG starts a run's interchange server.
    """
    with _one_line_errors():
        if checkpoint is not None and (config is not None or resume is not None):
            _fail("--checkpoint serves a model: give no CONFIG and no --resume with it")
        with _extra("server" if checkpoint is None else "all"):
            from tinkerscript.commands.serve import serve_checkpoint, serve_run
        if checkpoint is not None:
            work = serve_checkpoint(checkpoint, host, port, _console(), max_restarts=max_restarts)
            _run(work, exit_with_parent=exit_with_parent)
        _run(serve_run(config, resume, _console()), exit_with_parent=exit_with_parent)


@app.command("eval")
def evaluate(
    task: Annotated[str, typer.Argument(help="Inspect task: file.py@name or a registered name.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of a trained model; it is served while the eval runs.")
    ] = None,
    server: Annotated[str, typer.Option(help="Or the URL of a server that serves the model.")] = "",
    task_args: Annotated[str, typer.Option(help="Arguments of the task, as a JSON object.")] = "{}",
    model_roles: Annotated[str, typer.Option(help="Models of other roles, as a JSON object.")] = "{}",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of samples.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Attempts at each sample.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Per model call.")] = None,
    max_connections: Annotated[int, typer.Option(min=1, help="Concurrent model calls.")] = 32,
    sandbox: Annotated[str | None, typer.Option(help="Replaces the task's own sandbox.")] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder of the log, for inspect view.")] = Path("logs"),
) -> None:
    """Evaluate a model on an Inspect task.

    Works like `inspect eval`, and writes its log.
    """
    with _one_line_errors():
        with _extra("all"):
            from tinkerscript.commands.evaluate import EvalOptions, evaluate_command
        options = EvalOptions(
            task=task,
            checkpoint=checkpoint,
            server=server,
            api_key=_client_token() or "none",
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
        _run(evaluate_command(options, _console()))


@app.command()
def engine(
    checkpoint: Annotated[str, typer.Option(help="Folder of the model, or `tiny`.")] = "tiny",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Tinker's protocol here; 0: a free port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind with --port.")] = "127.0.0.1",
    state_dir: Annotated[
        Path, typer.Option(help="With --port: folder of its sessions and checkpoints.")
    ] = Path("runs/engine"),
    name: Annotated[
        str, typer.Option(help="With --port: the model's name to clients.", show_default="its folder")
    ] = "",
    full: Annotated[
        bool, typer.Option("--full", help="With --port: runs train all weights, not LoRA adapters.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="With --port: torch threads.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="With --port: sequences decoded together.")] = 128,
    max_runs: Annotated[int, typer.Option(min=1, help="With --port: training runs in memory.")] = 8,
    device: Annotated[str, typer.Option(help="With --port: torch device.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="With --port: auto, float32 or bfloat16 matrix products.")
    ] = "float32",
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing", help="With --port: compute activations again to save memory."
        ),
    ] = False,
    link: Annotated[str, typer.Option(help="Sample for the server with this link (its server.json).")] = "",
    link_keys: Annotated[
        Path | None, typer.Option(help="Folder of the link's keys, if it has any (its server.json).")
    ] = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve a model over Tinker's protocol.

    With --port over HTTP, to any of its clients; with --link it samples for an interchange server.
    """
    with _one_line_errors():
        if (port is None) == (not link):
            _fail("give --port to serve Tinker's protocol, or --link to sample for a server")
        with _extra("all"):
            from tinkerscript.commands.serve_engine import sample_for_server, serve_tinker
        if port is None:
            _run(sample_for_server(checkpoint, link, link_keys=link_keys), exit_with_parent=exit_with_parent)
        work = serve_tinker(
            checkpoint,
            _console(),
            state_dir=state_dir,
            name=name,
            host=host,
            port=port,
            full=full,
            threads=threads,
            max_batch=max_batch,
            max_runs=max_runs,
            device=device,
            dtype=dtype,
            activation_checkpointing=activation_checkpointing,
        )
        _run(work, exit_with_parent=exit_with_parent)


@app.command()
def status(server: Server = "") -> None:
    """Show what a server is doing."""
    from rich.table import Table

    from tinkerscript.client import TinkerScriptClient
    from tinkerscript.client.settings import DEFAULT_SERVER_URL
    from tinkerscript.errors import ServerUnreachableError

    url = server or DEFAULT_SERVER_URL
    with _one_line_errors(), TinkerScriptClient(url, timeout_s=0.0) as client:
        try:
            reply = client.get_engine_status()
        except ServerUnreachableError as error:
            _fail(
                f"no interchange server answers at {url}: {error.__cause__ or error}; "
                "`tinkerscript train` and `serve` start one, and --server names another",
                code=1,
            )
    console = _console()
    console.print(
        f"{reply.engine_status}  model {reply.model or '-'}  policy {reply.policy_version}  "
        f"step {reply.global_step}  trainer {'connected' if reply.trainer_connected else 'away'}"
    )
    if reply.failure or reply.run_finished:
        what = reply.failure or "the run is finished"
        console.print(plain(what), highlight=False, soft_wrap=True, markup=False)
    for name, reason in reply.quarantined.items():
        text = one_line(f"{name} is in quarantine: {reason}")
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    table = Table("episodes", "registered", "claimed", "ended", "accepted", "failed")
    for kind, counts in reply.episodes.items():
        table.add_row(kind, *(str(value) for value in counts.model_dump().values()))
    console.print(table)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it does not exist.")] = Path(),
) -> None:
    """Write an example to start from: a task, a config, and an agent."""
    with _one_line_errors():
        from tinkerscript.commands.init import write_example

        typer.echo(write_example(folder))


@app.command()
def merge(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a LoRA checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
) -> None:
    """Merge a LoRA checkpoint into its base model: a plain Hugging Face folder."""
    with _one_line_errors():
        with _extra("engine"):
            from tinkerscript.commands.merge_adapter import merge_checkpoint
        merge_checkpoint(checkpoint, target)
    typer.echo(f"{target} is a model by itself")


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/latest.")],
    episode: Annotated[
        str, typer.Argument(help="The beginning of an episode's uuid: show this episode.")
    ] = "",
    step: Annotated[
        str,
        typer.Option(
            help="List the episodes of this step or evaluation (before, step-5, after).",
            show_default="the last step",
        ),
    ] = "",
) -> None:
    """Show a run's steps and episodes, or one episode: what was asked, sampled and scored."""
    with _one_line_errors():
        with _extra("server"):
            from tinkerscript.commands.show import show_episode, show_run
        code = show_episode(run, episode, _console()) if episode else show_run(run, step, _console())
    raise typer.Exit(code)


@app.command()
def view(
    runs: Annotated[
        Path, typer.Argument(help="Folder of a run, or a folder with runs in it.", metavar="RUN|FOLDER")
    ] = Path("runs"),
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: a free port.", show_default="10087, or a free port"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond this machine it takes TINKERSCRIPT_ADMIN_TOKEN.")
    ] = "127.0.0.1",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a browser: curves, steps, episodes and their tokens."""
    with _one_line_errors():
        with _extra("server"):
            from tinkerscript.commands.view import view_command
        _run(view_command(runs, _console(), host=host, port=port, opens=open_))


@app.command("page", hidden=True)
def run_page(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    path: Annotated[Path | None, typer.Option("--socket", help="Unix socket to make.")] = None,
    fd: Annotated[int | None, typer.Option(help="Or the listening socket to use.")] = None,
    idle_s: Annotated[float, typer.Option(help="Seconds without a visit after which it ends.")] = 600.0,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve the page of one run: the process that `train` and the interchange server start."""
    _log_to_stderr()
    with _one_line_errors():
        if (path is None) == (fd is None):
            _fail("give one of --socket and --fd")
        with _extra("server"):
            from tinkerscript.commands.view import page_command
        _run(page_command(run_dir, path=path, fd=fd, idle_s=idle_s), exit_with_parent=exit_with_parent)


@app.command("mirror", hidden=True)
def run_mirror(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    exit_with_parent: ExitWithParent = True,
) -> None:
    """Write what a trainer elsewhere sends of its record: the process that the interchange server starts."""
    del exit_with_parent  # Standard input is what it reads.
    _log_to_stderr()
    with _one_line_errors():
        with _extra("server"):
            from tinkerscript.commands.mirror_record import mirror_command
        raise typer.Exit(mirror_command(run_dir))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/latest.")],
    target: Annotated[Path, typer.Argument(help="HTML file to write, or a folder for it.")] = Path(),
    steps: Annotated[int, typer.Option(min=1, help="Steps whose groups are in it, evenly spaced.")] = 20,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes whose conversations and tokens are in it.")
    ] = 300,
) -> None:
    """Write a run's page as one file that needs no server and no network."""
    with _one_line_errors():
        with _extra("server"):
            from tinkerscript.commands.export_page import export_command
        code = export_command(run, target, _console(), steps=steps, episodes=episodes)
    raise typer.Exit(code)


@app.command("server", hidden=True)
def interchange_server(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    exit_with_parent: ExitWithParent = False,
    serve_model: Annotated[
        bool, typer.Option(help="Serve the model itself: the client token is its API key.")
    ] = False,
) -> None:
    """Run the interchange server of one run folder: the process that `train` and `serve` start."""
    _log_to_stderr()
    with _one_line_errors(ConfigError, StoreError):
        with _extra("server"):
            from tinkerscript.server.process import run_server
        run_server(run_dir, exit_with_parent=exit_with_parent, serve_model=serve_model)


@app.command("rank", hidden=True)
def device_rank() -> None:
    """Compute for an engine on several devices: the process that it starts for each but the first."""
    with _one_line_errors():
        with _extra("all"):
            from tinkerscript.commands.train import follow_command
        follow_command()


def _run(work: Any, *, exit_with_parent: bool = False) -> NoReturn:
    from tinkerscript.lifecycle import run_until_interrupted

    raise typer.Exit(run_until_interrupted(work, exit_with_parent=exit_with_parent))


def _console() -> Console:
    from rich.console import Console

    return Console()


def _client_token() -> str | None:
    from tinkerscript.client.settings import client_token

    return client_token()


def _log_to_stderr() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("httpx", "httpx2"):  # They log every request; OpenAI's client uses the second.
        logging.getLogger(library).setLevel(logging.WARNING)


@contextmanager
def _one_line_errors(*fatal: type[TinkerScriptError]) -> Generator[None]:
    """End the command with one line for an error raised on purpose, not with a traceback.

    The exit code is 2 for `fatal` errors (default: all), and 1 for the others.
    """
    try:
        yield
    except TinkerScriptError as error:
        _fail(str(error), code=CANNOT_RUN if isinstance(error, fatal or TinkerScriptError) else 1)


@contextmanager
def _extra(name: str) -> Generator[None]:
    """Import in this block what `pip install 'tinkerscript[name]'` installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("tinkerscript", "inspect_tinker_bridge")):
            raise
        _fail(f"this command needs {error.name}: pip install 'tinkerscript[{name}]'")


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        _fail(f"{option}: not valid JSON: {error}: {text}")
    if not isinstance(value, dict):
        _fail(f'{option}: must be a JSON object such as {{"split": "test"}}, got {text}')
    return cast("dict[str, Any]", value)


def _fail(message: str, *, code: int = CANNOT_RUN) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(plain(message), err=True)
    raise typer.Exit(code)
