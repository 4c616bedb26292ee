"""Decides from which checkpoint a run resumes, and which earlier work still counts.

Resuming from the checkpoint of step k undoes later steps, in one transaction. Groups that had started by
then, and that no step up to k used, still train. If undone weights sampled a part, the group is given up and
its sample is asked first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

import msgspec

from tinkerscript.errors import ConfigError
from tinkerscript.ledger.ledger import Ledger
from tinkerscript.ledger.rows import (
    STANDS,
    UNDONE,
    CheckpointRow,
    EvaluationRow,
    PublicationRow,
    ResumptionRow,
    TrainedRow,
    TrainerRow,
    Use,
)

T = TypeVar("T")


class RowWriter(Protocol):
    def note(self, rows: Collection[TrainerRow]) -> None:
        """Write rows in one transaction, without waiting for it."""
        ...

    async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
        """Return once these and earlier rows are committed."""
        ...


class PlannedRow(msgspec.Struct, frozen=True, kw_only=True):
    episode_uuid: str
    group_id: str
    position: int
    step: int


class History(msgspec.Struct, frozen=True, kw_only=True):
    resumption: int = 1
    step: int = 0
    checkpoint: CheckpointRow | None = None
    evaluations: list[EvaluationRow] = []
    interrupted: list[int] = []
    versions: dict[int, int] = {}
    newest_version: int = -1
    """Including undone ones; -1 before the first."""

    planned: list[PlannedRow] = []
    """Started episodes of groups that can still train."""

    planned_groups: int = 0
    """Groups planned for the next step, except those set aside."""

    next_position: int = 0
    again: list[int] = []
    """Positions to ask again: undone weights sampled their groups."""

    replayed: list[TrainedRow] = []
    verdicts: dict[int, float] = {}
    open_until: int = 0
    """The last end number that waits for this trainer, or 0."""


class Tally(msgspec.Struct, kw_only=True):
    train_accepted: int = 0
    planned_accepted: int = 0
    eval_accepted: int = 0
    failed: int = 0
    cancelled: int = 0
    retries: int = 0
    left_out: int = 0
    """Unused results, for reasons other than their group's."""

    lost: int = 0
    """Episodes that never ended, or whose outcome was neither used nor left out."""


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    history: History
    used: dict[int, str]
    """Episode sequence -> outcome, for episodes that only undone steps used."""

    spoiled: frozenset[int]
    """Unused episodes that undone weights may have sampled."""


_SPOILED = """
SELECT DISTINCT e.sequence FROM {s}episodes AS e
JOIN {s}attempts AS a ON a.episode = e.sequence
    AND a.attempt = (SELECT max(attempt) FROM {s}attempts WHERE episode = e.sequence)
LEFT JOIN {s}calls AS c ON c.episode = e.sequence AND c.attempt = a.attempt
JOIN {s}publications AS p ON (p.undone != 0 OR p.step > ?) AND (
    p.policy_version IN (c.policy_version, c.last_version)
    OR (e.state = 'ended' AND p.policy_version = a.policy_version)
)
WHERE e.state IN ('claimed', 'ended') AND e.episode_type = 'train' AND e.step BETWEEN 1 AND ? AND e.undone = 0
    AND (e.consumed = 0 OR e.sequence IN (SELECT episode FROM {s}trained WHERE undone = 0 AND step > ?))
"""

_AGAIN = """
SELECT DISTINCT position FROM {s}episodes WHERE position BETWEEN 0 AND ? AND undone != 0
    AND position NOT IN (SELECT position FROM {s}episodes WHERE position >= 0 AND undone = 0)
    ORDER BY position
"""

_INTERRUPTED = """
SELECT DISTINCT step FROM {s}episodes WHERE label LIKE 'step-%' AND step < ?
    AND label NOT IN (SELECT label FROM {s}evaluations WHERE undone = 0) ORDER BY step
"""

LAST_STEP = "SELECT coalesce(max(step), 0) FROM {s}steps"


def check_covers(last_step: int, checkpoints: Collection[int]) -> None:
    if checkpoints and max(checkpoints) > last_step:
        raise ConfigError(
            f"the ledger ends with step {last_step}, before the checkpoint of step {max(checkpoints)}: it "
            "was truncated or replaced; restore the whole ledger, or remove the later checkpoints to "
            "resume from what it has"
        )


async def begin(ledger: Ledger, checkpoints: Collection[int], *, time: float) -> Beginning:
    """Like `find_beginning`, and undo the later steps, without waiting for the commit."""
    beginning = await find_beginning(ledger, checkpoints)
    undo_later(ledger, beginning.history, time=time)
    return beginning


async def find_beginning(ledger: Ledger, checkpoints: Collection[int], *, replay_lag: int = 0) -> Beginning:
    """Resume from the newest of `checkpoints` (steps with complete files) that has a row.

    `History.replayed` covers the last `replay_lag` steps. Raises ConfigError if the ledger is older than a
    checkpoint.
    """
    ((last_step,),) = await ledger.read(LAST_STEP)
    check_covers(last_step, checkpoints)
    saved = await ledger.rows(CheckpointRow, "WHERE undone = 0 ORDER BY step")
    checkpoint = next((each for each in reversed(saved) if each.step in checkpoints), None)
    step = checkpoint.step if checkpoint else 0
    ((resumption, newest),) = await ledger.read(
        "SELECT (SELECT coalesce(max(resumption), 0) + 1 FROM {s}resumptions), "
        "(SELECT coalesce(max(policy_version), -1) FROM {s}publications)"
    )
    standing = "WHERE undone = 0 AND step <= ?"
    published = await ledger.rows(PublicationRow, standing, (step,))
    trained = list[TrainedRow]()
    if replay_lag:
        rest = f"{standing} AND step > ? AND place >= 0 ORDER BY step, role, place, episode"
        trained = await ledger.rows(TrainedRow, rest, (step, step - replay_lag))
    used = dict[int, str](
        await ledger.read(
            "SELECT episode, outcome FROM {s}trained WHERE undone = 0 AND step > ? AND episode NOT IN "
            "(SELECT episode FROM {s}trained WHERE undone = 0 AND step <= ?)",
            (step, step),
        )
    )
    positions = await ledger.read(
        "SELECT position FROM {s}episodes WHERE position >= 0 AND undone = 0 AND step <= ? "
        "ORDER BY position DESC LIMIT 1",
        (step + 1,),
    )
    judged = await ledger.read(
        "SELECT episode, reward FROM {s}verdicts WHERE reward IS NOT NULL AND episode NOT IN "
        "(SELECT episode FROM {s}trained WHERE undone = 0 AND step <= ?)",
        (step - replay_lag,),
    )
    history = History(
        resumption=resumption,
        step=step,
        checkpoint=checkpoint,
        evaluations=await ledger.rows(EvaluationRow, f"{standing} ORDER BY time", (step,)),
        interrupted=[each for (each,) in await ledger.read(_INTERRUPTED, (step,))],
        versions={each.policy_version: each.step for each in published},
        newest_version=newest,
        next_position=1 + positions[0][0] if positions else 0,
        replayed=trained,
        verdicts=dict(judged),
    )
    spoiled = await ledger.read(_SPOILED, (step, step + 1, step))
    return Beginning(history=history, used=used, spoiled=frozenset(each for (each,) in spoiled))


async def given_up_positions(ledger: Ledger, history: History) -> list[int]:
    """Call this once the resumption is committed."""
    return [each for (each,) in await ledger.read(_AGAIN, (history.next_position - 1,))]


def undo_later(ledger: Ledger, history: History, *, time: float) -> None:
    ledger.put(ResumptionRow(resumption=history.resumption, step=history.step, time=time))
    for kind in UNDONE:
        stays = f" AND outcome != '{Use.SET_ASIDE}'" if kind is TrainedRow else ""
        ledger.execute(
            f"UPDATE {{s}}{kind.TABLE} SET undone = ? WHERE undone = {STANDS} AND step > ?{stays}",
            history.resumption,
            history.step,
        )


_ENDS = """
SELECT state, failure, episode_type, count(*), sum(CASE WHEN step > 0 THEN 1 ELSE 0 END),
    sum(CASE WHEN consumed = 0 AND pool = '' THEN 1 ELSE 0 END)
FROM {s}episodes GROUP BY state, failure, episode_type
"""


async def tally(ledger: Ledger) -> Tally:
    found = Tally()
    for state, failure, kind, number, planned, lost in await ledger.read(_ENDS):
        found.lost += int(lost)
        if state == "failed" and failure == "cancelled":
            found.cancelled += number
        elif state == "failed":
            found.failed += number
        elif state == "ended" and kind == "eval":
            found.eval_accepted += number
        elif state == "ended":
            found.train_accepted += number
            found.planned_accepted += int(planned)
    ((found.retries,),) = await ledger.read(
        "SELECT count(*) FROM {s}attempts AS a JOIN {s}episodes AS e ON e.sequence = a.episode "
        "WHERE a.failure IS NOT NULL AND e.state = 'ended'"
    )
    ((found.left_out,),) = await ledger.read(
        "SELECT count(DISTINCT t.episode) FROM {s}trained AS t "
        "JOIN {s}episodes AS e ON e.sequence = t.episode "
        "WHERE t.undone = 0 AND e.state = 'ended' AND t.outcome IN (?, ?, ?)",
        (Use.LEFT_OUT, Use.SET_ASIDE, Use.STALE),
    )
    return found
