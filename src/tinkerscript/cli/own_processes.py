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
    log_to_stderr,
    one_line_errors,
)
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.tracing import start_tracing


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
    listener: Annotated[int, typer.Option(help="File descriptor of the socket where model calls come.")],
    exit_with_parent: ExitWithParent = True,
) -> None:
    """Answer the model calls of a share of the claims: a process that the interchange server starts."""
    del exit_with_parent  # It always does.
    log_to_stderr()
    start_tracing("gateway")
    with one_line_errors(ConfigError):
        with extra("server"):
            from tinkerscript.server.gateway_process import run_gateway
        run_gateway(number, channel=channel, listener=listener)


def device_rank() -> None:
    """Compute for an engine on several devices: the process that it starts for each but the first."""
    with one_line_errors():
        with extra("all"):
            from tinkerscript.commands.train import follow_command
        follow_command()
