"""The page of a run as a child process: starting and ending it.

Invariant: it ends with this process, however that dies: its standard input is a pipe from here.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinkerscript.lifecycle import own_command, stop_child

STOP_GRACE_S = 4.0
"""Seconds between the request to stop and SIGKILL."""


def page_log(run_dir: Path) -> Path:
    """Where the page of a run writes what it has to say."""
    return run_dir / "logs" / "page.log"


async def start_page(
    run_dir: Path, *options: str, environ: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Process:
    """Start the page of a run. `options`: of `tinkerscript page`, which say where it listens."""
    path = page_log(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *own_command("page", "--run-dir", str(run_dir), *options),
            stdin=PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal is for this process.
            env=environ,
            pass_fds=pass_fds,
        )


def ask_to_stop(page: Process) -> None:
    """Close the page's standard input, at which it ends."""
    if page.stdin is not None:
        page.stdin.close()


async def stop_page(page: Process) -> None:
    """End the page: in order if it can, by force otherwise, and at once if this is cancelled."""
    await stop_child(page, STOP_GRACE_S)
