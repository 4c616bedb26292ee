"""The command line. This package owns the options, `commands` the implementations."""

from __future__ import annotations

from typing import Annotated

import typer

from tinkerscript.cli.control import app as control
from tinkerscript.cli.conventions import CANNOT_RUN
from tinkerscript.cli.looking import export, show, view
from tinkerscript.cli.models import config, evaluate, init, lr_find, merge, train
from tinkerscript.cli.rollout_machine import status, worker
from tinkerscript.cli.serving import (
    device_rank,
    engine,
    interchange_server,
    run_gateway_process,
    serve,
)

__all__ = ["CANNOT_RUN", "app"]


app = typer.Typer(
    name="tinkerscript",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to format help than all else takes.
    help="Reinforcement learning for agents whose rollouts are ordinary programs.",
)


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
    """Keep `tinkerscript COMMAND` a group even with one command."""


app.command()(init)
app.command()(train)
app.command()(config)
app.command("eval")(evaluate)
app.command()(lr_find)
app.command()(merge)
app.command()(view)
app.command()(show)
app.command()(export)
app.command()(worker)
app.command()(serve)
app.command()(engine)
app.command()(status)
app.add_typer(control)

app.command("gateway", hidden=True)(run_gateway_process)
app.command("server", hidden=True)(interchange_server)
app.command("rank", hidden=True)(device_rank)
