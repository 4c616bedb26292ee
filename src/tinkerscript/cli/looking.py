"""`tinkerscript view | show | export`: runs, for people to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tinkerscript.cli.conventions import console, extra, one_line_errors, run_to_exit


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
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.view import view_command
        run_to_exit(view_command(runs, console(), host=host, port=port, opens=open_))


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
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.show import show_episode, show_run
        code = show_episode(run, episode, console()) if episode else show_run(run, step, console())
    raise typer.Exit(code)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/latest.")],
    target: Annotated[Path, typer.Argument(help="HTML file to write, or a folder for it.")] = Path(),
    steps: Annotated[int, typer.Option(min=1, help="Steps whose groups are in it, evenly spaced.")] = 20,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes whose conversations and tokens are in it.")
    ] = 300,
) -> None:
    """Write a run's page as one file that needs no server and no network."""
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.export_page import export_command
        code = export_command(run, target, console(), steps=steps, episodes=episodes)
    raise typer.Exit(code)
