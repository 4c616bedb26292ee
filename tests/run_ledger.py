"""What a run's ledger says, read without its server, and what stands for one in tests: `LedgerWriter` and
`KeptRows`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import uuid4

from msgspec.structs import astuple

from tinkerscript.config import RunConfig, dump_config
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE, RUN_ID, stamp
from tinkerscript.ledger.compression import DICTIONARIES, Dictionaries
from tinkerscript.ledger.ledger import CALLS_OF_CLAIM, decoded, row_of
from tinkerscript.ledger.reader import STATUS, LedgerReader
from tinkerscript.ledger.rows import (
    LEDGER_VERSION,
    TABLES,
    AttemptRow,
    EpisodeRow,
    FactRow,
    Row,
    TrainedRow,
    TrainerRow,
    Use,
    columns,
    create_statements,
    on_conflict,
)
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


def dictionaries(run: Path) -> Dictionaries:
    """Those that the ledger's blobs are compressed with."""
    return Dictionaries(lambda: [content for _, content in ask(run, DICTIONARIES.replace("{s}", ""))])


def rows(run: Path, kind: type[R], rest: str = "", *parameters: Any) -> list[R]:
    """Rows of a table. `rest`: what follows its name in a SELECT."""
    query = f"SELECT {', '.join(columns(kind))} FROM {kind.TABLE} {rest}"
    return [row_of(kind, found) for found in ask(run, query, *parameters)]


def ended_episode(sequence: int, **values: Any) -> EpisodeRow:
    """An episode that trained in step 1, unless `values` say otherwise."""
    given: dict[str, Any] = {
        **{"uuid": f"e{sequence}", "episode_type": "train", "group_id": "g", "pool": "", "group_size": 1},
        **{"step": 1, "label": "", "position": 0, "sample": b"", "digest": b"", "state": "ended"},
        **{"failure": "", "forgiven": 0, "reward": 1.0, "is_success": None, "result_digest": b""},
        **{"end_number": sequence, "ended_at": 1.0, "offered": 0, "consumed": 1, "dropped": 0},
        **{"emptied": 0, "undone": 0},
    }
    return EpisodeRow(sequence=sequence, **given | values)


def claim(episode: int, attempt: int = 1, **values: Any) -> AttemptRow:
    """A claim of an episode that has not failed, unless `values` say otherwise."""
    given: dict[str, Any] = {
        **{"client": "w", "request_id": "", "claimed_at": 1.0, "queued_s": None, "policy_version": 0},
        **{"lease_s": 1.0, "failure": None},
    }
    return AttemptRow(episode=episode, attempt=attempt, **given | values)


def outcomes(run: Path) -> list[Outcome]:
    """How the episodes of a run ended, in that order, as a trainer gets to know it."""
    ended: list[Outcome] = []
    for episode in rows(run, EpisodeRow, "WHERE end_number IS NOT NULL ORDER BY end_number"):
        own = episode.sequence
        attempts = rows(run, AttemptRow, "WHERE episode = ? ORDER BY attempt = 0, attempt", own)
        found = ask(run, "SELECT result FROM results WHERE episode = ?", own)
        result = found[0][0] if found else b""
        record = restored(episode, attempts, b"{}", result)
        found = ask(run, CALLS_OF_CLAIM.replace("{s}", ""), own, record.attempt)
        calls = decoded(found, dictionaries(run))
        ended.append(outcome_of(record, calls, result=result))
    return ended


def results(run: Path) -> list[EpisodeAccepted]:
    """Those of the episodes with a result."""
    return [each for each in outcomes(run) if isinstance(each, EpisodeAccepted)]


def standing_steps(run: Path) -> list[int]:
    """The training steps that changed weights, and that no resumption has undone."""
    query = "SELECT step FROM steps WHERE undone = 0 AND stopped = '' ORDER BY step"
    return [step for (step,) in ask(run, query)]


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
    found, known = dict[str, list[Call]](), dictionaries(run)
    for uuid, call in ask(run, query):
        found.setdefault(uuid, []).extend(decoded([(call,)], known))
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
    unscored = (
        "SELECT uuid FROM episodes AS e WHERE episode_type = 'eval' AND pool = '' AND undone = 0 AND NOT "
        "EXISTS (SELECT 1 FROM evaluations AS v WHERE v.label = e.label AND v.step = e.step AND undone = 0)"
    )
    assert ask(run, unscored) == []
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


class LedgerWriter:
    """Writes rows into the ledger of a run that never ran, in a folder with an id and a config."""

    def __init__(self, folder: Path, **config: Any) -> None:
        """`config`: of a new run; a run that is there goes on."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        if not (folder / RUN_ID).exists():
            (folder / RUN_ID).write_text(uuid4().hex)
            (folder / CONFIG_FILE).write_text(dump_config(RunConfig.model_validate(config)))
        self._ledger = sqlite3.connect(folder / LEDGER_FILE, isolation_level=None)
        if self.execute("PRAGMA user_version").fetchone() == (0,):
            stamp(self._ledger, folder / LEDGER_FILE)
            self.execute("PRAGMA journal_mode = WAL")
            for statement in create_statements():
                self.execute(statement.replace("{s}", ""))
            self.execute(f"PRAGMA user_version = {LEDGER_VERSION}")
        self.execute("PRAGMA synchronous = OFF")
        (self.last,) = self.execute("SELECT coalesce(max(sequence), 0) FROM episodes").fetchone()
        """The number of the last episode: in the order of registration, and of the ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._ledger.close()

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return self._ledger.execute(sql, parameters)

    def put(self, *rows: Row) -> None:
        """Write rows in one transaction."""
        by_kind: dict[type[Row], list[Row]] = {}
        for row in rows:
            by_kind.setdefault(type(row), []).append(row)
        self.execute("BEGIN")
        for kind in TABLES:
            names = columns(kind)
            insert = f"INSERT INTO {kind.TABLE} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            self._ledger.executemany(insert + on_conflict(kind), map(astuple, by_kind.get(kind, [])))
        self.execute("COMMIT")

    def status(self, **said: Any) -> None:
        """The trainer says this of itself, and what it said before of all else."""
        self.put(FactRow(name=STATUS, value=json.dumps(self.reader.status() | said).encode()))

    @cached_property
    def reader(self) -> LedgerReader:
        """Of this ledger."""
        return LedgerReader(self.folder)
