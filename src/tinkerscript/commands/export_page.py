"""`tinkerscript export`: a run as one HTML file, to send by mail."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tinkerscript.errors import ConfigError
from tinkerscript.files import write_atomically
from tinkerscript.page.export import export_run
from tinkerscript.record.reader import Record, find_runs

WARN_MB = 25
"""Many mail servers refuse more."""


def export_command(run: Path, target: Path, console: Console, *, steps: int, episodes: int) -> int:
    """Write the file. Raises ConfigError for a folder of several runs, or of none."""
    found = find_runs(run)
    if len(found) > 1:
        raise ConfigError(f"{run} has {len(found)} runs; name one of them, such as {run / next(iter(found))}")
    ((name, folder),) = found.items()
    if target.is_dir():
        target = target / f"{name}.html"
    text = export_run(name, Record(folder), steps=steps, episodes=episodes)
    try:
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    size = len(text.encode()) / 1e6
    large = "; take fewer with --steps and --episodes" if size > WARN_MB else ""
    console.print(f"{target}: {size:.1f} MB{large}", highlight=False, soft_wrap=True, markup=False)
    return 0
