"""`tinkerscript control` operates a running server with the client's methods.

The token comes from the environment: TINKERSCRIPT_ADMIN_TOKEN, or the same with `_FILE`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinkerscript.cli.conventions import Server, fail
from tinkerscript.dashboard import counted, one_line

if TYPE_CHECKING:
    from tinkerscript.client import TinkerScriptClient
    from tinkerscript.protocol import FailedEpisodesReply

ADMIN = "TINKERSCRIPT_ADMIN_TOKEN"

app = typer.Typer(
    name="control", no_args_is_help=True, help="Operate a running server.", rich_markup_mode=None
)

Episodes = Annotated[list[str], typer.Argument(help="Uuids of failed episodes.")]


@app.command()
def start(
    config: Annotated[
        Path | None, typer.Argument(help="Training config; by default the server's own.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Stop the current trainer first.")] = False,
    server: Server = "",
) -> None:
    """Start a trainer at the server."""
    with _client(server) as client:
        if config is not None:
            client.sync_train_config(_text(config))
        client.start_engine(force_restart=force)
    typer.echo("the engine is booting; see `tinkerscript status`")


@app.command()
def stop(server: Server = "") -> None:
    """Ask the trainer to end its run in an orderly way; the run can be resumed."""
    with _client(server) as client:
        client.stop_engine()


@app.command()
def failed(server: Server = "") -> None:
    """List the failed episodes, each with its last failure."""
    with _client(server) as client:
        episodes = list(client.failed_episodes())
        if not episodes:
            typer.echo("no failed episodes", err=True)
        for episode in episodes:
            last = episode.failures[-1]
            reason = one_line(f"{last.kind}: {last.message}")
            failures = counted(len(episode.failures), "failure")
            typer.echo(f"{one_line(episode.episode_uuid)}  {failures}  {reason}")


@app.command()
def retry(episodes: Episodes, server: Server = "") -> None:
    """Give failed episodes new attempts."""
    with _client(server) as client:
        _report(client.retry_failed_episodes(episodes))


@app.command()
def drop(episodes: Episodes, server: Server = "") -> None:
    """Remove failed episodes from the list."""
    with _client(server) as client:
        _report(client.drop_failed_episodes(episodes))


@contextmanager
def _client(url: str) -> Generator[TinkerScriptClient]:
    from tinkerscript.client import TinkerScriptClient
    from tinkerscript.client.settings import role_token
    from tinkerscript.errors import ClientError, ServerUnreachableError

    try:
        with TinkerScriptClient(url, token=role_token(ADMIN), timeout_s=0.0) as client:
            yield client
    except ServerUnreachableError as error:
        fail(f"no interchange server answers at {url}: {error.__cause__ or error}", code=1)
    except (ClientError, ValueError) as error:
        fail(str(error))


def _report(reply: FailedEpisodesReply) -> None:
    for uuid in reply.done:
        typer.echo(f"{uuid}  done")
    for uuid, reason in reply.refused.items():
        typer.echo(f"{uuid}  refused: {one_line(reason)}")
    if reply.refused:
        raise typer.Exit(1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {error}")
