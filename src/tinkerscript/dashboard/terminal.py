"""What a run shows while it goes on and at its end, on a console that may be a terminal."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tinkerscript.dashboard.line_reporter import LineReporter
from tinkerscript.dashboard.table_reporter import TableReporter


@contextmanager
def shown_progress(console: Console) -> Generator[LineReporter | TableReporter]:
    """Shows a run while the context is open: a table in place in a terminal, otherwise lines."""
    if console.is_interactive and console.file.isatty():
        with TableReporter(console).opened() as reporter:
            yield reporter
    else:
        yield LineReporter(console)


def open_in_browser(url: str, note: Callable[[str], object]) -> None:
    """Open `url` in the user's browser, in a thread: finding one takes time.

    `note` is told if there is none.
    """

    def work() -> None:
        if not webbrowser.open(url):
            note(f"no browser was found here; open {url}")

    threading.Thread(target=work, name="browser", daemon=True).start()


def print_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """The table of a finished run's summary.json, and its alignment report."""
    table = Table(show_header=False, title=f"Run {folder.name}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in _rows(summary):
        table.add_row(label, value)
    roles: Mapping[str, Mapping[str, Any]] = summary.get("roles", {})
    for name, role in roles.items():
        table.add_section()
        for label, value in _role_rows(role):
            table.add_row(f"{name}: {label}", value)
    console.print(table)
    reports = {"": summary["alignment"], **{f" of {name}": role["alignment"] for name, role in roles.items()}}
    for whose, lines in reports.items():
        console.print(f"\nToken alignment{whose}", style="bold")
        for line in lines:
            console.print(f"  {line}", highlight=False, soft_wrap=True)


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if summary["eval_before"] is not None:
        rows += [
            ("held-out score before", f"{summary['eval_before']:.3f}"),
            ("held-out score after", f"{summary['eval_after']:.3f}"),
            ("evaluation episodes, each time", f"{summary['eval_episodes']:,}"),
        ]
    return [
        *rows,
        ("training episodes", f"{summary['train_episodes']:,}"),
        ("episodes per second", f"{summary['episodes_per_s']:.0f}"),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("training time", f"{summary['train_seconds']:.0f} s"),
        ("lost / failed / retried", f"{summary['episodes_lost']} / {summary['episodes_failed']} / "
                                    f"{summary['episodes_retried']}"),
        ("max |trainer - sampler logprob|", f"{summary['max_abs_dlogp']:.1e}"),
        ("sequences per episode", f"{summary['sequences_per_episode']:.2f}"),
    ]  # fmt: skip


def _role_rows(role: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of a role that trains."""
    rows: list[tuple[str, str]] = []
    if role["eval_before"] is not None:
        rows.append(("held-out score before", f"{role['eval_before']:.3f}"))
    if role["eval_after"] is not None:
        rows.append(("held-out score after", f"{role['eval_after']:.3f}"))
    return [
        *rows,
        ("tokens trained", f"{role['tokens_trained']:,}"),
        ("max |trainer - sampler logprob|", f"{role['max_abs_dlogp']:.1e}"),
    ]
