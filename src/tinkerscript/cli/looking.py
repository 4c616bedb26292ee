"""`tinkerscript view | show | export`: runs, for people to look at."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tinkerscript.cli.conventions import console, extra, one_line_errors, run_to_exit


class ColorBy(StrEnum):
    """What a token's color says."""

    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    ENTROPY = "entropy"
    GAP = "gap"
    VERSION = "version"


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
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, or a folder with runs in it.", metavar="RUN|FOLDER")
    ] = Path("runs"),
    episode: Annotated[
        str, typer.Argument(help="The beginning of an episode's uuid: its conversation, scores and tokens.")
    ] = "",
    steps: Annotated[bool, typer.Option("--steps", help="List the steps.")] = False,
    step: Annotated[
        str, typer.Option(help="The groups of this step, or the episodes of an evaluation, such as before.")
    ] = "",
    episodes: Annotated[bool, typer.Option("--episodes", help="List the episodes, newest first.")] = False,
    search: Annotated[
        str | None, typer.Option(help="Episodes with these words, or such as 'reward<0.5 step=3'.")
    ] = None,
    compare: Annotated[
        str,
        typer.Option(help="Two evaluations sample by sample: before..after; '..': the first and the last."),
    ] = "",
    findings: Annotated[
        bool, typer.Option("--findings", help="Token alignment, and what was found.")
    ] = False,
    finding: Annotated[str, typer.Option(help="The episodes of one finding, as --findings names it.")] = "",
    sequence: Annotated[
        int | None, typer.Option(min=0, help="With EPISODE: this training sequence, token by token.")
    ] = None,
    color_by: Annotated[ColorBy, typer.Option(help="What the colors of tokens say.")] = ColorBy.LOGPROB,
    filter_: Annotated[
        str,
        typer.Option(
            "--filter",
            help="--step: failed, truncated, all_equal, best, worst. --episodes: accepted, failed, "
            "truncated, trained, untrained. --compare: better, worse, same.",
        ),
    ] = "all",
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of steps or episodes.")] = 30,
    start: Annotated[
        int | None, typer.Option(min=0, help="Continue a list here: `next` of what came before.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As the page's API answers.")] = False,
) -> None:
    """Show runs, or a run's steps and episodes: what was asked, sampled and scored."""
    with one_line_errors():
        with extra("server"):
            from tinkerscript.commands.show import Wanted, show_command
        wanted = Wanted(
            episode=episode,
            sequence=sequence,
            steps=steps,
            step=step,
            episodes=episodes,
            search=search,
            compare=compare,
            findings=findings,
            finding=finding,
            filter=filter_,
            limit=limit,
            start=start,
            color_by=color_by.value,
        )
        code = show_command(run, wanted, console(), as_json=as_json)
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
