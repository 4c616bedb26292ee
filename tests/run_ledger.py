"""What a run's ledger says, read without its server, and a ledger for tests that need none."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.ledger import CALLS_OF_CLAIM, decoded, row_of
from tinkerscript.ledger.rows import AttemptRow, EpisodeRow, Row, TrainedRow, TrainerRow, Use, columns
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import restored
from tinkerscript.server.trainer_messages import outcome_of
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome

R = TypeVar("R", bound=Row)


def ask(run: Path, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """The rows that a query finds, also while the run goes on; none before the ledger has its tables."""
    path = run / LEDGER_FILE
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as ledger:
        has_tables = ledger.execute("SELECT 1 FROM sqlite_schema WHERE name = 'steps'").fetchone()
        return ledger.execute(sql, parameters).fetchall() if has_tables else []


def rows(run: Path, kind: type[R], rest: str = "", *parameters: Any) -> list[R]:
    """Rows of a table. `rest`: what follows its name in a SELECT."""
    query = f"SELECT {', '.join(columns(kind))} FROM {kind.TABLE} {rest}"
    return [row_of(kind, found) for found in ask(run, query, *parameters)]


def outcomes(run: Path) -> list[Outcome]:
    """How the episodes of a run ended, in that order, as a trainer gets to know it."""
    ended: list[Outcome] = []
    for episode in rows(run, EpisodeRow, "WHERE end_number IS NOT NULL ORDER BY end_number"):
        own = episode.sequence
        attempts = rows(run, AttemptRow, "WHERE episode = ? ORDER BY attempt = 0, attempt", own)
        found = ask(run, "SELECT result FROM results WHERE episode = ?", own)
        result = found[0][0] if found else b""
        record = restored(episode, attempts, b"{}", result)
        calls = decoded(ask(run, CALLS_OF_CLAIM.replace("{s}", ""), own, record.attempt))
        ended.append(outcome_of(record, {record.attempt: calls}, result=result))
    return ended


def results(run: Path) -> list[EpisodeAccepted]:
    """Those of the episodes with a result."""
    return [each for each in outcomes(run) if isinstance(each, EpisodeAccepted)]


def standing_steps(run: Path) -> list[int]:
    """The training steps that no resumption has undone."""
    return [step for (step,) in ask(run, "SELECT step FROM steps WHERE undone = 0 ORDER BY step")]


def with_result(run: Path, kind: str = "train") -> list[str]:
    """The episodes of a kind that ended with a result, by uuid, in the order in which they ended."""
    query = "SELECT uuid FROM episodes WHERE state = 'ended' AND episode_type = ? ORDER BY end_number"
    return [uuid for (uuid,) in ask(run, query, kind)]


def counted_calls(run: Path) -> dict[str, list[Call]]:
    """Episode -> the calls of the claim that counts."""
    query = (
        "SELECT uuid, call FROM calls AS c JOIN episodes ON sequence = episode WHERE state = 'ended' "
        "AND attempt = (SELECT max(attempt) FROM attempts AS a WHERE a.episode = c.episode) ORDER BY number"
    )
    found: dict[str, list[Call]] = {}
    for uuid, call in ask(run, query):
        found.setdefault(uuid, []).extend(decoded([(call,)]))
    return found


def check_books(run: Path, *, may_fail: bool = False) -> None:
    """Nothing of a run that is over is lost or doubled: each episode of the trainer has ended with a result,
    or was cancelled, and was used or left out; the steps that stand are without a gap; policy versions
    increase. `may_fail`: an episode may have failed too.
    """
    cancelled = "EXISTS (SELECT 1 FROM attempts WHERE episode = sequence AND failure LIKE '%\"cancelled\"%')"
    own = ask(run, f"SELECT uuid, state, consumed, {cancelled} FROM episodes WHERE pool = ''")
    assert own
    lost = [
        uuid
        for uuid, state, consumed, was_cancelled in own
        if not consumed or not (state == "ended" or (state == "failed" and (may_fail or was_cancelled)))
    ]
    assert lost == []
    (ended,), (kept,) = ask(
        run,
        "SELECT count(*) FROM episodes WHERE state = 'ended' UNION ALL "
        "SELECT count(*) FROM results JOIN episodes ON sequence = episode WHERE state = 'ended'",
    )
    assert ended == kept
    unexplained = (
        "SELECT uuid FROM episodes WHERE consumed AND NOT dropped "
        "AND NOT EXISTS (SELECT 1 FROM trained WHERE episode = sequence)"
    )
    assert ask(run, unexplained) == []
    twice = "SELECT episode, role FROM trained WHERE undone = 0 GROUP BY episode, role HAVING count(*) > 1"
    assert ask(run, twice) == []
    steps = standing_steps(run)
    assert steps == list(range(1, len(steps) + 1))
    versions = [version for (version,) in ask(run, "SELECT policy_version FROM publications ORDER BY time")]
    assert versions == sorted(set(versions))
    calls = [call for each in counted_calls(run).values() for call in each if not call.is_foreign]
    assert {version for call in calls for version in call.policy_versions} <= set(versions)


def used(outcomes: Iterable[Outcome]) -> list[TrainedRow]:
    """What a trainer commits that has used these outcomes."""
    return [TrainedRow(episode=each.sequence, step=0, outcome=Use.EVALUATED) for each in outcomes]


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
