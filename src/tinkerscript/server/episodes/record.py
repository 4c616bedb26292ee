"""The record of one episode, its states, and the table of legal moves between them.

Invariant: a state changes only along `TRANSITIONS`, and only `EpisodeBook` changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tinkerscript.protocol import TRAINER_POOL, EpisodeType, Failure

State = Literal["registered", "claimed", "ended", "accepted", "failed"]

TRANSITIONS: Mapping[State, frozenset[State]] = {
    "registered": frozenset({"claimed", "failed"}),
    "claimed": frozenset({"registered", "ended", "failed"}),
    "ended": frozenset({"accepted", "failed"}),
    "accepted": frozenset(),
    "failed": frozenset({"registered"}),
}
"""registered -> claimed -> ended -> accepted. A lost claim goes back to registered, or on to failed; an
operator may retry a failed episode as long as no trainer can have its failure. A result that no message can
carry to the trainer fails its episode: `ended` -> failed."""

STATES: tuple[State, ...] = tuple(TRANSITIONS)

UNDELIVERABLE = "undeliverable"
"""Failure kind of an episode whose result is larger than a message to the trainer may be."""

CANCELLED = "cancelled"
"""Failure kind of an episode that the trainer no longer needs."""

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
    """JSON object; deleted once the outcome is acknowledged."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    """Number of episodes in the group; 0 if unknown."""

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
    result: bytes = b""
    """JSON of `WorkflowOutput`; deleted once the outcome is acknowledged."""

    result_digest: bytes = b""
    failures: list[Failure] = field(default_factory=list[Failure])
    offered: bool = False
    """The failure was sent to a trainer, which may have it in its journal before it acknowledges it."""

    acknowledged: bool = False
    """The trainer has the outcome in its journal."""

    dropped: bool = False
    """An operator took the episode off the list of failures."""

    @property
    def attempt(self) -> int:
        """The number of the last claim; 0 before the first."""
        return len(self.claimants)

    @property
    def queued_s(self) -> float | None:
        """Seconds that it waited for its last claim; None: unknown."""
        return max(0.0, self.claimed_at - self.queued_at) if self.queued_at else None

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
        if attempt == self.attempt and self.state in ("ended", "accepted"):
            return f"{name} is over: the episode has ended with its result"
        for failure in self.failures:
            if failure.attempt == attempt:
                return f"{name} no longer holds the lease: {failure.kind}: {failure.message}"
        return f"{name} was never made; the last one is {self.attempt}"

    def why_failure_stands(self) -> str:
        """Why this failed episode cannot be retried; empty if it can."""
        if self.acknowledged:
            return (
                f"the failure of episode {self.uuid!r} is in the trainer's journal and its group is closed: "
                "an episode ends exactly once"
            )
        if self.offered:
            return (
                f"the failure of episode {self.uuid!r} was sent to the trainer, which may have it in its "
                "journal: an episode ends exactly once"
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

    closed: list[ClosedClaim] = field(default_factory=list[ClosedClaim])


def content_digest(*parts: bytes) -> bytes:
    """16 bytes that differ for different parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
