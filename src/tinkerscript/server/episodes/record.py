"""The record of one episode in memory, its states, the table of legal moves between them, and its rows in the
ledger.

Invariant: a state changes only along `TRANSITIONS`, and only `EpisodeBook` changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast, get_args

from tinkerscript.ledger.rows import AttemptRow, EpisodeRow, ResultRow, Row, SampleRow
from tinkerscript.protocol import TRAINER_POOL, EpisodeType, Failure

State = Literal["registered", "claimed", "ended", "failed"]

TRANSITIONS: Mapping[State, frozenset[State]] = {
    "registered": frozenset({"claimed", "failed"}),
    "claimed": frozenset({"registered", "ended", "failed"}),
    "ended": frozenset({"failed"}),
    "failed": frozenset({"registered"}),
}
"""registered -> claimed -> ended. A lost claim goes back to registered, or on to failed; an operator may
retry a failed episode as long as no trainer can have its failure. A result that no message can carry to the
trainer fails its episode: `ended` -> failed."""

Status = Literal["registered", "claimed", "ended", "accepted", "failed"]
"""What clients are shown: `accepted` is an `ended` episode that is consumed."""

STATUSES: tuple[Status, ...] = get_args(Status)

UNDELIVERABLE = "undeliverable"
"""Failure kind of an episode whose result is larger than a message to the trainer may be."""

CANCELLED = "cancelled"
"""Failure kind of an episode that the trainer no longer needs."""

BAD_PAYLOAD = "bad_payload"
"""Failure kind of an episode whose payload no reply can hold."""

LEASE_EXPIRED = "lease_expired"
CLAIM_EXPIRED = "claim_expired"
"""Failure kind of a claim that lived as long as one may."""

CLIENT_GONE = "client_gone"
"""Failure kind of a claim that its client never got."""

WORKER_DIED = "worker_died"
"""Failure kind of a claim whose client is dead, as the trainer that started it says."""

CLIENT_STOPPED = "client_stopped"
"""Failure kind of a claim whose client an operator has stopped."""

SERVER_KINDS = {
    *(CANCELLED, UNDELIVERABLE, BAD_PAYLOAD, WORKER_DIED, LEASE_EXPIRED, CLAIM_EXPIRED),
    *(CLIENT_GONE, CLIENT_STOPPED),
}
"""Failure kinds that only the server gives: in a client's own words they would lie about who ended what."""

EPISODE_TYPES: tuple[EpisodeType, ...] = ("train", "eval")


@dataclass(slots=True, kw_only=True, eq=False)
class EpisodeRecord:
    """One episode as the server keeps it."""

    uuid: str
    sequence: int
    """Number in the order of registration; unique."""

    episode_type: EpisodeType
    group_id: str
    digest: bytes
    """Digest of the registration: tells a repeated one from a different one with the same uuid."""

    payload: bytes
    """JSON object; not kept in memory once the episode is consumed."""

    sample: bytes
    """Digest of the payload, by which the ledger has it."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    """Number of episodes in the group; 0 if unknown."""

    step: int = 0
    """The first training step that could train on it, or the one that its evaluation follows; 0: a client's
    own sample."""

    label: str = ""
    """Of its evaluation; empty for training."""

    position: int = -1
    """Of its sample in the order of training; -1 if it has none."""

    state: State = "registered"
    claimants: list[str] = field(default_factory=list[str])
    """`client_uuid` of each claim, oldest first."""

    request_ids: list[str] = field(default_factory=list[str])
    """`claim_request_id` of each claim, oldest first; empty if the client sent none."""

    forgiven: int = 0
    """Number of claims that do not count against `max_attempts`: those before the last retry, and those that
    were handed back."""

    lease_s: float = 0.0
    claimed_at: float = 0.0
    """Unix time of the last claim; 0 before the first."""

    queued_at: float = 0.0
    """Unix time when it last began to wait for a claim; 0: in a process before this one. Not stored."""

    queued_s: float | None = None
    """Seconds that it waited for its last claim; None: unknown."""

    renewed_at: float = 0.0
    """Last activity of the last claim, on the book's clock; 0 if there was none in this process. Not stored:
    a restart renews every lease."""

    ends_at: float = math.inf
    """When the last claim ends however active it is, on the book's clock. Not stored: derived from
    `claimed_at`."""

    calls_in_flight: int = 0
    """Model calls of the last claim in flight. Not stored."""

    policy_version: int = 0
    """The engine's policy version when the last claim was made."""

    reward: float | None = None
    is_success: bool | None = None
    """Whether its result says that it solved its sample."""

    result: bytes = b""
    """JSON of `WorkflowOutput`; not kept in memory once the episode is consumed."""

    result_digest: bytes = b""
    failures: list[Failure] = field(default_factory=list[Failure])
    end_number: int | None = None
    """In the order in which episodes ended or failed; None before."""

    ended_at: float | None = None
    """Unix time when it ended or failed."""

    offered: bool = False
    """The failure was sent to a trainer, which may have used it."""

    consumed: bool = False
    """A step or an evaluation of the trainer used the outcome or left it out, or a resumption gave it up."""

    undone: int = 0
    """The resumption that undid the step that it was planned for; 0: it stands."""

    dropped: bool = False
    """An operator took the episode off the list of failures."""

    emptied: bool = False
    """Its calls and transcripts were dropped, to save room."""

    @property
    def status(self) -> Status:
        """What clients are shown."""
        return "accepted" if self.state == "ended" and self.consumed else self.state

    @property
    def attempt(self) -> int:
        """The number of the last claim; 0 before the first."""
        return len(self.claimants)

    @property
    def last_failure(self) -> str:
        """The kind of the failure with which it ended; empty for one that has not failed."""
        return self.failures[-1].kind if self.state == "failed" else ""

    @property
    def client_uuid(self) -> str:
        """The owner of the last claim; empty before the first."""
        return self.claimants[-1] if self.claimants else ""

    @property
    def deadline(self) -> float:
        """When the last claim expires without further activity, on the book's clock."""
        return min(self.renewed_at + self.lease_s, self.ends_at)

    def why_lost(self, attempt: int) -> str:
        """Why this claim does not hold the lease; empty if it does."""
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
        """Why this failed episode cannot be retried; empty if it can."""
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
    """A snapshot of one claim: unlike its episode it does not change while the reply is being sent."""

    episode_uuid: str
    attempt: int
    client_uuid: str
    episode_type: EpisodeType
    group_id: str
    payload: bytes
    policy_version: int
    lease_s: float
    left_s: float
    """Seconds until the claim ends, however active it is."""


class ClosedClaim(NamedTuple):
    """A claim that no longer holds the lease."""

    episode: EpisodeRecord
    attempt: int
    counts: bool
    """Whether it ended with the episode's result: its calls are kept."""

    fault: str = ""
    """How its client failed; empty if it did not, or somebody else ended the claim."""


@dataclass(slots=True)
class Changes:
    """What has changed since the last `take_changes`."""

    added: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    saved: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    """Changed episodes by uuid, without those in `added`."""

    attempts: dict[tuple[int, int], AttemptRow] = field(default_factory=dict[tuple[int, int], AttemptRow])
    """Claims that were made or have failed, by sequence and attempt."""

    closed: list[ClosedClaim] = field(default_factory=list[ClosedClaim])


def rows_of(changes: Changes) -> Iterator[Row]:
    """What the ledger has to have of the changes."""
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
    """The last claim of an episode; attempt 0: what ended it while nobody held it."""
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
    """An episode from its rows; `attempts` in order, from 1, and then 0."""
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
    """16 bytes that differ for different parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
