"""`tinkerscript view | show | export`: look at runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from tinkerscript.cli.conventions import ExitWithParent, console, extra, one_line_errors, run_to_exit
from tinkerscript.errors import ConfigError

MAIL_MB = 25  # Many mail servers refuse larger messages.


def view(
    runs: Annotated[
        Path, typer.Argument(help="Folder of a run, or a folder with runs in it.", metavar="RUN|FOLDER")
    ] = Path("runs"),
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: a free port.", show_default="10085, or a free port"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; other than loopback needs TINKERSCRIPT_ADMIN_TOKEN.")
    ] = "127.0.0.1",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    certificate: Annotated[
        str, typer.Option("--tls-certificate", help="PEM file of a certificate, to serve HTTPS.")
    ] = "",
    key: Annotated[
        str,
        typer.Option("--tls-key", help="PEM file of its key; by default in the certificate's file."),
    ] = "",
    fd: Annotated[
        int | None, typer.Option(hidden=True, help="The listening socket of a run's own page.")
    ] = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Show runs in a browser: curves, steps, episodes and their tokens."""
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.view import serve_page, view_command
        if fd is not None:
            work = serve_page(runs, socket.socket(fileno=fd), certificate=certificate, key=key)
        else:
            work = view_command(
                runs, console(), host=host, port=port, opens=open_, certificate=certificate, key=key
            )
        run_to_exit(work, exit_with_parent=exit_with_parent)


def show(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, or a folder with runs in it.", metavar="RUN|FOLDER")
    ] = Path("runs"),
    what: Annotated[
        str,
        typer.Argument(
            help="The beginning of an episode's uuid, or a path of the page's API, such as /steps/3.",
            metavar="EPISODE|/PATH",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of steps.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reply of the page's API.")] = False,
) -> None:
    """Show runs, the steps of a run, or an episode: what was asked, sampled and scored."""
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.show import show_command
        code = show_command(run, what, console(), limit=limit, as_json=as_json)
    raise typer.Exit(code)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/latest.")],
    target: Annotated[Path, typer.Argument(help="HTML file to write, or a folder for it.")] = Path(),
    steps: Annotated[int, typer.Option(min=1, help="Steps to include with groups, evenly spaced.")] = 20,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes to include with conversations and tokens.")
    ] = 300,
) -> None:
    """Write a run's page as one file that needs no server and no network."""
    with one_line_errors():
        with extra("server"):
            from tinkerscript.files import write_atomically
            from tinkerscript.ledger.reader import LedgerReader, find_runs
            from tinkerscript.page.export import export_run
        found = find_runs(run)
        if len(found) > 1:
            raise ConfigError(f"{run} has {len(found)} runs; name one, such as {run / next(iter(found))}")
        ((name, folder),) = found.items()
        if target.is_dir():
            target = target / f"{name}.html"
        text = export_run(name, LedgerReader(folder), steps=steps, episodes=episodes)
        try:
            write_atomically(target, text)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    size = len(text.encode()) / 1e6
    large = "; include fewer with --steps and --episodes" if size > MAIL_MB else ""
    typer.echo(f"{target}: {size:.1f} MB{large}")
