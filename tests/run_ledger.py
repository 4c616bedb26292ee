"""What a run's ledger says, read without its server, and a ledger for tests that need none."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.ledger import CALLS, decoded, row_of
from tinkerscript.ledger.rows import AttemptRow, EpisodeRow, Row, TrainerRow, columns
from tinkerscript.server.episodes.record import restored
from tinkerscript.server.trainer_messages import outcome_of
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome

R = TypeVar("R", bound=Row)


def rows(folder: Path, kind: type[R], rest: str = "", parameters: Sequence[Any] = ()) -> list[R]:
    """Rows of a run's ledger. `rest`: what follows the table's name in a SELECT."""
    query = f"SELECT {', '.join(columns(kind))} FROM {kind.TABLE} {rest}"
    return [row_of(kind, found) for found in read(folder, query, parameters)]


def read(folder: Path, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """What a SELECT finds in a run's ledger; also while it is written."""
    path = (folder / LEDGER_FILE).absolute()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as run:
        return run.execute(query, parameters).fetchall()


def outcomes(folder: Path) -> list[Outcome]:
    """How the episodes of a run ended, in that order, as a trainer gets to know it."""
    found: list[Outcome] = []
    for episode in rows(folder, EpisodeRow, "WHERE end_number IS NOT NULL ORDER BY end_number"):
        own = (episode.sequence,)
        attempts = rows(folder, AttemptRow, "WHERE episode = ? ORDER BY attempt = 0, attempt", own)
        results = read(folder, "SELECT result FROM results WHERE episode = ?", own)
        result = results[0][0] if results else b""
        record = restored(episode, attempts, b"{}", result)
        query = CALLS.replace("{s}", "")
        calls = decoded(read(folder, query, (episode.sequence, record.attempt)))
        found.append(outcome_of(record, {record.attempt: calls}, result=result))
    return found


def results(folder: Path) -> list[EpisodeAccepted]:
    """Those of the episodes with a result."""
    return [each for each in outcomes(folder) if isinstance(each, EpisodeAccepted)]


class KeptRows:
    """In place of a ledger: keeps a trainer's rows in a list."""

    def __init__(self) -> None:
        self.kept: list[TrainerRow] = []

    def note(self, rows: Collection[TrainerRow]) -> None:
        self.kept += rows

    async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
        self.note(rows)

    def of(self, kind: type[R]) -> list[R]:
        """The rows of a table."""
        return [row for row in self.kept if isinstance(row, kind)]
