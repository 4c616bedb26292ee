"""The commands that our own processes start as children; they are not listed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinkerscript.cli.conventions import (
    ExitWithParent,
    LogFormat,
    LogFormatOption,
    extra,
    fail,
    log_to_stderr,
    one_line_errors,
    run_to_exit,
)
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.tracing import start_tracing


def run_page(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    path: Annotated[Path | None, typer.Option("--socket", help="Unix socket to make.")] = None,
    fd: Annotated[int | None, typer.Option(help="Or the listening socket to use.")] = None,
    idle_s: Annotated[float, typer.Option(help="Seconds without a visit after which it ends.")] = 600.0,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve the page of one run: the process that `train` and the interchange server start."""
    log_to_stderr()
    with one_line_errors():
        if (path is None) == (fd is None):
            fail("give one of --socket and --fd")
        with extra("server"):
            from tinkerscript.commands.view import page_command
        work = page_command(run_dir, path=path, fd=fd, idle_s=idle_s)
        run_to_exit(work, exit_with_parent=exit_with_parent)


def run_mirror(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    exit_with_parent: ExitWithParent = True,
) -> None:
    """Write what a trainer elsewhere sends of its record: the process that the interchange server starts."""
    del exit_with_parent  # Standard input is what it reads.
    log_to_stderr()
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.mirror_record import mirror_command
        raise typer.Exit(mirror_command(run_dir))


def interchange_server(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")],
    exit_with_parent: ExitWithParent = False,
    serve_model: Annotated[
        bool, typer.Option(help="Serve the model itself: the client token is its API key.")
    ] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the interchange server of one run folder: the process that `train` and `serve` start."""
    log_to_stderr(log_format)
    start_tracing("server")
    with one_line_errors(ConfigError, StoreError):
        with extra("server"):
            from tinkerscript.server.process import run_server
        run_server(run_dir, exit_with_parent=exit_with_parent, serve_model=serve_model)


def run_gateway_process(
    number: Annotated[int, typer.Option(help="Which of the server's gateway processes this is.")],
    channel: Annotated[int, typer.Option(help="File descriptor of the socket to the server.")],
    door: Annotated[int, typer.Option(help="File descriptor of the socket for connections.")],
    exit_with_parent: ExitWithParent = True,
) -> None:
    """Answer the model calls of a share of the claims: a process that the interchange server starts."""
    del exit_with_parent  # It always does.
    log_to_stderr()
    start_tracing("gateway")
    with one_line_errors(ConfigError):
        with extra("server"):
            from tinkerscript.server.gateways.gateway_process import run_gateway
        run_gateway(number, channel=channel, door=door)


def device_rank() -> None:
    """Compute for an engine on several devices: the process that it starts for each but the first."""
    with one_line_errors():
        with extra("all"):
            from tinkerscript.commands.train import follow_command
        follow_command()
