"""Remove containers when the process that started them ends.

Inspect leaves them behind if the process is killed or the engine does not answer. This file runs as a
separate process. It learns each Compose project's name before the project starts, and removes the rest
when its standard input closes.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_LABEL = "com.docker.compose.project"
# Networks and volumes can only go when no container uses them.
_KINDS = {
    "container": (["ps", "--all"], "ID", ["rm", "--force", "--volumes"]),
    "network": (["network", "ls"], "ID", ["network", "rm"]),
    "volume": (["volume", "ls"], "Name", ["volume", "rm", "--force"]),
}

# An engine may not answer yet.
_PATIENCE_S = 60.0

_sweeper: subprocess.Popen[bytes] | None = None


def remove_at_the_end(project: str) -> None:
    global _sweeper
    if _sweeper is None or _sweeper.poll() is not None:
        _sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    assert _sweeper.stdin is not None
    _sweeper.stdin.write(f"{project}\n".encode())
    _sweeper.stdin.flush()


@atexit.register
def remove_now() -> None:
    if _sweeper is not None:
        _sweeper.communicate()


def _sweep(projects: set[str]) -> None:
    # A running command could create more.
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        ended = _end_commands(projects)
        found = {kind: _found(kind, projects) for kind in _KINDS}
        if not ended and all(names == [] for names in found.values()):
            return
        for kind, names in found.items():
            if names:
                _docker(*_KINDS[kind][2], *names)
        time.sleep(0.5)  # Earlier requests may be in progress.


def _end_commands(projects: set[str]) -> bool:
    # `docker compose up` may outlive its caller.
    ended = False
    for pid, words in _commands():
        if "--project-name" in words and not projects.isdisjoint(words):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended = True
    return ended


def _commands() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), (entry / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue


def _found(kind: str, projects: set[str]) -> list[str] | None:
    listing, name, _ = _KINDS[kind]
    shown = f'{{{{.{name}}}}} {{{{.Label "{_LABEL}"}}}}'
    lines = _docker(*listing, "--filter", f"label={_LABEL}", "--format", shown)
    if lines is None:
        return None
    return [known for known, _, project in (line.partition(" ") for line in lines) if project in projects]


def _docker(*arguments: str) -> list[str] | None:
    try:
        done = subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


if __name__ == "__main__":
    _sweep({line.strip() for line in sys.stdin})
