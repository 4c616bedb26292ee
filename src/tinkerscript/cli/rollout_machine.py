"""`tinkerscript worker | status`: the commands for a machine with the base install."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tinkerscript.cli.conventions import (
    ExitWithParent,
    LogFormat,
    LogFormatOption,
    Server,
    checked_server,
    console,
    fail,
    json_object,
    log_to_stderr,
    one_line_errors,
)
from tinkerscript.dashboard import one_line, plain
from tinkerscript.errors import TinkerScriptError, WorkerError


class EpisodeChoice(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    ANY = "any"


def worker(
    script: Annotated[
        Path | None, typer.Argument(help="Python file with a rollout(episode) function.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task instead of a script: file.py@name, verifiers:ENV, ... Repeatable."),
    ] = None,
    task_args: Annotated[
        list[str] | None, typer.Option(help="Arguments of a task, as a JSON object, in the same order.")
    ] = None,
    eval_args: Annotated[
        list[str] | None,
        typer.Option(help="Arguments for evaluations; by default those of --task-args."),
    ] = None,
    sandbox: Annotated[
        list[str] | None,
        typer.Option(help="Replaces a task's sandbox, in the same order: TYPE, TYPE:CONFIG_FILE, or ''."),
    ] = None,
    agent: Annotated[
        str,
        typer.Option(
            help="Let a coding agent work on the tasks: claude-code, codex, mini-swe-agent, opencode."
        ),
    ] = "",
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which an agent is stopped and its work scored.")
    ] = 1800.0,
    server: Server = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at a time.")] = 16,
    episode_type: Annotated[EpisodeChoice, typer.Option(help="Episodes to claim.")] = EpisodeChoice.ANY,
    pool: Annotated[str, typer.Option(help="Claim episodes of this client instead of the trainer's.")] = "",
    allow_discard_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds without activity after which a claim's lease expires.")
    ] = 60.0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds for episodes to finish after SIGTERM."),
    ] = 20.0,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for an unreachable server. 0: no limit.")
    ] = 600.0,
    client_uuid: Annotated[
        str, typer.Option(help="Name of this worker at the server.", show_default="a new uuid")
    ] = "",
    log_format: LogFormatOption = LogFormat.TEXT,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run a server's episodes on this machine."""
    log_to_stderr(log_format)
    with one_line_errors(WorkerError if exit_with_parent else TinkerScriptError):
        from tinkerscript.workers.worker import WorkerOptions, tasks_with_args, worker_process

        arguments = [json_object("--task-args", each) for each in task_args or []]
        of_evaluations = [json_object("--eval-args", each) for each in eval_args or []]
        options = WorkerOptions(
            server_url=server,
            script=str(script or ""),
            tasks=tasks_with_args(task or [], arguments),
            eval_args=tasks_with_args(task or [], of_evaluations) if of_evaluations else {},
            sandboxes=dict(zip(task or [], sandbox or [], strict=False)),
            agent=agent,
            time_limit_s=time_limit,
            concurrency=concurrency,
            client_uuid=client_uuid or None,
            episode_type=episode_type.value,
            pool=pool,
            allow_discard_timeout=allow_discard_timeout,
            exit_with_parent=exit_with_parent,
            grace_s=drain_timeout,
            give_up_after_s=wait or None,
        )
        raise typer.Exit(worker_process(options))


def status(
    run: Annotated[
        str, typer.Argument(help="Folder of a run, such as runs/latest, instead of --server.")
    ] = "",
    server: Server = "",
) -> None:
    """Show what a server is doing."""
    from rich.table import Table

    from tinkerscript.client import TinkerScriptClient
    from tinkerscript.errors import ServerUnreachableError

    url = checked_server(run) if run else server
    with one_line_errors(), TinkerScriptClient(url, timeout_s=0.0) as client:
        try:
            reply = client.get_engine_status()
        except ServerUnreachableError as error:
            fail(
                f"no interchange server answers at {url}: {error.__cause__ or error}; "
                "`tinkerscript train` and `serve` start one, and --server names another",
                code=1,
            )
    screen = console()
    screen.print(
        f"{reply.engine_status}  model {reply.model or '-'}  policy {reply.policy_version}  "
        f"step {reply.global_step}  trainer {'connected' if reply.trainer_connected else 'away'}"
    )
    if reply.failure or reply.run_finished:
        what = reply.failure or "the run is finished"
        screen.print(plain(what), highlight=False, soft_wrap=True, markup=False)
    for name, reason in reply.quarantined.items():
        text = one_line(f"client {name!r} is in quarantine: {reason}")
        screen.print(text, highlight=False, soft_wrap=True, markup=False)
    table = Table("episodes", "registered", "claimed", "ended", "accepted", "failed")
    for kind, counts in reply.episodes.items():
        table.add_row(kind, *(str(value) for value in counts.model_dump().values()))
    screen.print(table)
