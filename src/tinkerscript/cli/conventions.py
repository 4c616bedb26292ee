"""What all commands share: common options, and what a user sees of an error: one line and exit code 2, or 1
where a restart may help.

Invariant: the modules of this package import typer and nothing heavier. Each command imports what it runs, so
that `--help` and a bare install need no more; a missing package names the extra that installs it.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from tinkerscript.dashboard import plain
from tinkerscript.errors import TinkerScriptError

if TYPE_CHECKING:
    from rich.console import Console

CANNOT_RUN = 2
"""Exit code for what the user has to change; a supervisor does not restart such a process."""


def checked_server(value: str) -> str:
    """The URL of a server that the user names by it or by its run's folder."""
    from tinkerscript.client.settings import checked_url, local_server_url, url_of_run

    try:
        if not value:
            return local_server_url()
        return url_of_run(Path(value)) if Path(value).is_dir() else checked_url(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Server = Annotated[
    str,
    typer.Option(
        envvar="TINKERSCRIPT_SERVER_URL",
        help="URL of the interchange server, or its run's folder.",
        show_default="the newest run's here, or http://127.0.0.1:10086",
        callback=checked_server,
    ),
]

ExitWithParent = Annotated[bool, typer.Option(hidden=True, help="End when standard input closes.")]


def run_to_exit(work: Any, *, exit_with_parent: bool = False) -> NoReturn:
    from tinkerscript.lifecycle import run_until_interrupted

    raise typer.Exit(run_until_interrupted(work, exit_with_parent=exit_with_parent))


def console() -> Console:
    from rich.console import Console

    return Console()


class LogFormat(StrEnum):
    """How a process logs."""

    TEXT = "text"
    JSON = "json"


LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="TINKERSCRIPT_LOG_FORMAT",
        help="Lines for people, or a JSON object a line.",
    ),
]


def log_to_stderr(format: LogFormat | None = None) -> None:
    """Log in `format`, or in the one that the environment names."""
    from tinkerscript.logs import start_logging

    start_logging(None if format is None else format.value)


@contextmanager
def one_line_errors(*fatal: type[TinkerScriptError]) -> Generator[None]:
    """End the command with one line for an error raised on purpose, not with a traceback.

    The exit code is 2 for `fatal` errors (default: all), and 1 for the others.
    """
    try:
        yield
    except TinkerScriptError as error:
        fail(str(error), code=CANNOT_RUN if isinstance(error, fatal or TinkerScriptError) else 1)


@contextmanager
def extra(name: str) -> Generator[None]:
    """Import in this block what `pip install 'tinkerscript[name]'` installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("tinkerscript", "inspect_tinker_bridge")):
            raise
        fail(f"this command needs {error.name}: pip install 'tinkerscript[{name}]'")


def json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        fail(f"{option}: not valid JSON: {error}: {text}")
    if not isinstance(value, dict):
        fail(f'{option}: must be a JSON object such as {{"split": "test"}}, got {text}')
    return cast("dict[str, Any]", value)


def on_port(port: int | None) -> list[str]:
    """The override of a run's config that `--port` stands for."""
    return [] if port is None else [f"interchange_server.interchange_server_port={port}"]


def fail(message: str, *, code: int = CANNOT_RUN) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(plain(message), err=True)
    raise typer.Exit(code)
