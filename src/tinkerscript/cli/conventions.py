"""Options and error handling that all commands share.

For a fast `--help` and a small base install, modules of this package import nothing heavier than typer, and
each command imports what it runs.
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
"""With this exit code no supervisor restarts us, because the user must change something."""


def checked_server(value: str) -> str:
    """`value`: a server's URL or its run's folder."""
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
        help="URL of the interchange server, or the folder of its run.",
        show_default="the newest run here, or http://127.0.0.1:10086",
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


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


DeviceOption = Annotated[str, typer.Option(help="Torch device that runs the checkpoint: cpu, cuda, cuda:1.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of its matrix products; choose the run's.")]


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="TINKERSCRIPT_LOG_FORMAT",
        help="Plain lines, or a JSON object per line.",
    ),
]


def log_to_stderr(format: LogFormat | None = None) -> None:
    from tinkerscript.logs import start_logging

    start_logging(None if format is None else format.value)


@contextmanager
def one_line_errors(*fatal: type[TinkerScriptError]) -> Generator[None]:
    """Print our own errors as one line.

    The exit code is 2 for `fatal` errors (by default, all), and 1 for others, which a restart may cure.
    """
    try:
        yield
    except TinkerScriptError as error:
        fail(str(error), code=CANNOT_RUN if isinstance(error, fatal or TinkerScriptError) else 1)


@contextmanager
def extra(name: str) -> Generator[None]:
    """If an import in this block fails, name the extra to install."""
    from tinkerscript.lifecycle import without_garbage_collection

    try:
        with without_garbage_collection():
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
    return [] if port is None else [f"interchange_server.interchange_server_port={port}"]


def fail(message: str, *, code: int = CANNOT_RUN) -> NoReturn:
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(plain(message), err=True)
    raise typer.Exit(code)
