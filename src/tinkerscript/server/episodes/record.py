"""`EpisodeRecord`: an episode in memory, its states, and its rows in the ledger.

Only `EpisodeBook` changes a state, and only along `TRANSITIONS`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast, get_args

from tinkerscript.ledger import Ledger
from tinkerscript.ledger.rows import AttemptRow, EpisodeRow, ResultRow, Row, SampleRow
from tinkerscript.protocol import TRAINER_POOL, EpisodeType, Failure

State = Literal["registered", "claimed", "ended", "failed"]

# A lost claim goes to `registered` or `failed`. An operator may retry a failed episode until a trainer may
# know of it. `ended` -> `failed`: the result is too large to deliver.
TRANSITIONS: Mapping[State, frozenset[State]] = {
    "registered": frozenset({"claimed", "failed"}),
    "claimed": frozenset({"registered", "ended", "failed"}),
    "ended": frozenset({"failed"}),
    "failed": frozenset({"registered"}),
}

# An `ended` episode is `accepted` once consumed.
Status = Literal["registered", "claimed", "ended", "accepted", "failed"]

STATUSES: tuple[Status, ...] = get_args(Status)

UNDELIVERABLE = "undeliverable"
CANCELLED = "cancelled"
BAD_PAYLOAD = "bad_payload"  # The payload fits in no reply.
LEASE_EXPIRED = "lease_expired"
CLAIM_EXPIRED = "claim_expired"
CLIENT_GONE = "client_gone"
WORKER_DIED = "worker_died"  # Reported by its trainer.
CLIENT_STOPPED = "client_stopped"

# Only the server records these kinds, because clients could blame others with them.
SERVER_KINDS = {
    *(CANCELLED, UNDELIVERABLE, BAD_PAYLOAD, WORKER_DIED, LEASE_EXPIRED, CLAIM_EXPIRED),
    *(CLIENT_GONE, CLIENT_STOPPED),
}

UPDATED_AT_ONCE = 5000

EPISODE_TYPES: tuple[EpisodeType, ...] = ("train", "eval")


@dataclass(slots=True, kw_only=True, eq=False)
class EpisodeRecord:
    """`EpisodeRow` explains the stored fields."""

    uuid: str
    sequence: int
    episode_type: EpisodeType
    group_id: str
    digest: bytes
    """Identifies a repeated registration."""

    payload: bytes
    """JSON; dropped from memory once consumed."""

    sample: bytes
    """The payload's digest."""

    pool: str = TRAINER_POOL

    group_size: int = 0
    step: int = 0
    label: str = ""
    position: int = -1
    state: State = "registered"
    claimants: list[str] = field(default_factory=list[str])
    request_ids: list[str] = field(default_factory=list[str])
    """`claim_request_id` of each claim, or empty."""

    forgiven: int = 0
    """Claims that do not count against `max_attempts`."""

    lease_s: float = 0.0
    claimed_at: float = 0.0
    """Unix time of the last claim."""

    queued_at: float = 0.0
    """Unix time; 0: before a restart. Not stored."""

    queued_s: float | None = None
    renewed_at: float = 0.0
    """On the book's clock. Not stored: a restart renews leases."""

    ends_at: float = math.inf
    """On the book's clock, even if active. Not stored."""

    calls_in_flight: int = 0
    policy_version: int = 0
    reward: float | None = None
    is_success: bool | None = None

    result: bytes = b""
    """`WorkflowOutput` as JSON; dropped once consumed."""

    result_digest: bytes = b""
    failures: list[Failure] = field(default_factory=list[Failure])
    end_number: int | None = None
    ended_at: float | None = None
    offered: bool = False
    consumed: bool = False
    undone: int = 0
    dropped: bool = False
    emptied: bool = False

    @property
    def status(self) -> Status:
        return "accepted" if self.state == "ended" and self.consumed else self.state

    @property
    def attempt(self) -> int:
        return len(self.claimants)

    @property
    def last_failure(self) -> str:
        return self.failures[-1].kind if self.state == "failed" else ""

    @property
    def client_uuid(self) -> str:
        return self.claimants[-1] if self.claimants else ""

    @property
    def deadline(self) -> float:
        return min(self.renewed_at + self.lease_s, self.ends_at)

    def why_lost(self, attempt: int) -> str:
        """Why this claim does not hold the lease, or empty."""
        if attempt == self.attempt and self.state == "claimed":
            return ""
        name = f"claim {attempt} of episode {self.uuid}"
        if attempt == self.attempt and self.state == "ended":
            return f"{name} is over: the episode has ended with its result"
        for failure in self.failures:
            if failure.attempt == attempt:
                return f"{name} no longer holds the lease: {failure.kind}: {failure.message}"
        return f"{name} was never made; the last one is {self.attempt}"

    def why_failure_stands(self) -> str:
        """Why it cannot be retried, or empty."""
        if self.consumed:
            return (
                f"the trainer has used the failure of episode {self.uuid!r} and its group is closed: "
                "an episode ends exactly once"
            )
        if self.offered:
            return (
                f"the failure of episode {self.uuid!r} was sent to the trainer, which may have used it: "
                "an episode ends exactly once"
            )
        last = self.failures[-1]
        return f"episode {self.uuid!r} was cancelled: {last.message}" if last.kind == CANCELLED else ""


class Claim(NamedTuple):
    """Unchanged while the reply is sent."""

    episode_uuid: str
    attempt: int
    client_uuid: str
    episode_type: EpisodeType
    group_id: str
    payload: bytes
    policy_version: int
    lease_s: float
    left_s: float


class ClosedClaim(NamedTuple):
    episode: EpisodeRecord
    attempt: int
    counts: bool
    fault: str = ""


@dataclass(slots=True)
class Changes:
    added: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    saved: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    """By uuid, without those added."""

    claimed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Sequence and attempt of new claims, which change only the row's state."""

    consumed: dict[int, bool] = field(default_factory=dict[int, bool])
    attempts: dict[tuple[int, int], AttemptRow] = field(default_factory=dict[tuple[int, int], AttemptRow])
    closed: list[ClosedClaim] = field(default_factory=list[ClosedClaim])


# Runs after the transaction's rows, when the claim may be over.
_SET_CLAIMED = """
UPDATE {s}episodes SET state = 'claimed' WHERE sequence = ? AND state = 'registered' AND EXISTS
    (SELECT 1 FROM {s}attempts WHERE episode = sequence AND attempt = ? AND failure IS NULL)
"""


def write_changes(ledger: Ledger, changes: Changes) -> None:
    """A whole row would update all of its indexes."""
    ledger.note(_rows_of(changes))
    for claim in changes.claimed:
        ledger.execute(_SET_CLAIMED, *claim)
    for value in set(changes.consumed.values()):
        sequences = [each for each, consumed in changes.consumed.items() if consumed == value]
        for start in range(0, len(sequences), UPDATED_AT_ONCE):
            among = ", ".join(map(str, sequences[start : start + UPDATED_AT_ONCE]))
            update = f"UPDATE {{s}}episodes SET consumed = ? WHERE sequence IN ({among})"
            ledger.execute(update, int(value))


def _rows_of(changes: Changes) -> Iterator[Row]:
    for episode in changes.added.values():
        yield SampleRow(digest=episode.sample, payload=episode.payload)
    for episode in (*changes.added.values(), *changes.saved.values()):
        yield episode_row(episode)
        if episode.state == "ended" and episode.result:
            yield ResultRow(episode=episode.sequence, result=episode.result)
    yield from changes.attempts.values()


def episode_row(episode: EpisodeRecord) -> EpisodeRow:
    return EpisodeRow(
        sequence=episode.sequence,
        uuid=episode.uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        pool=episode.pool,
        group_size=episode.group_size,
        step=episode.step,
        label=episode.label,
        position=episode.position,
        sample=episode.sample,
        digest=episode.digest,
        state=episode.state,
        failure=episode.last_failure,
        forgiven=episode.forgiven,
        reward=episode.reward,
        is_success=None if episode.is_success is None else int(episode.is_success),
        result_digest=episode.result_digest,
        end_number=episode.end_number,
        ended_at=episode.ended_at,
        offered=int(episode.offered),
        consumed=int(episode.consumed),
        dropped=int(episode.dropped),
        emptied=int(episode.emptied),
        undone=episode.undone,
    )


def attempt_row(episode: EpisodeRecord, attempt: int) -> AttemptRow:
    failure = next((each for each in episode.failures if each.attempt == attempt), None)
    is_claim = attempt > 0
    return AttemptRow(
        episode=episode.sequence,
        attempt=attempt,
        client=episode.claimants[attempt - 1] if is_claim else "",
        request_id=episode.request_ids[attempt - 1] if is_claim else "",
        claimed_at=episode.claimed_at if is_claim else 0.0,
        queued_s=episode.queued_s if is_claim else None,
        policy_version=episode.policy_version if is_claim else 0,
        lease_s=episode.lease_s if is_claim else 0.0,
        failure=None if failure is None else failure.model_dump_json(),
    )


def restored(
    episode: EpisodeRow, attempts: Sequence[AttemptRow], payload: bytes, result: bytes
) -> EpisodeRecord:
    """`attempts`: in order from 1, then 0."""
    claims = [each for each in attempts if each.attempt]
    failures = [Failure.model_validate_json(each.failure) for each in attempts if each.failure is not None]
    record = EpisodeRecord(
        uuid=episode.uuid,
        sequence=episode.sequence,
        episode_type=cast("EpisodeType", episode.episode_type),
        group_id=episode.group_id,
        digest=episode.digest,
        payload=payload,
        sample=episode.sample,
        pool=episode.pool,
        group_size=episode.group_size,
        step=episode.step,
        label=episode.label,
        position=episode.position,
        state=cast("State", episode.state),
        claimants=[each.client for each in claims],
        request_ids=[each.request_id for each in claims],
        forgiven=episode.forgiven,
        reward=episode.reward,
        is_success=None if episode.is_success is None else bool(episode.is_success),
        result=result,
        result_digest=episode.result_digest,
        failures=failures,
        end_number=episode.end_number,
        ended_at=episode.ended_at,
        offered=bool(episode.offered),
        consumed=bool(episode.consumed),
        dropped=bool(episode.dropped),
        emptied=bool(episode.emptied),
        undone=episode.undone,
    )
    if claims:
        last = claims[-1]
        record.lease_s, record.claimed_at, record.queued_s = last.lease_s, last.claimed_at, last.queued_s
        record.policy_version = last.policy_version
    return record


def content_digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
