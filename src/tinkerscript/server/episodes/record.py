"""The record of one episode, its states, and the one table of legal moves between them."""

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
    "ended": frozenset({"accepted"}),
    "accepted": frozenset(),
    "failed": frozenset({"registered"}),
}
"""registered -> claimed -> ended -> accepted; a lost claim goes back to registered or on to failed, and an
operator may have a failed episode tried again as long as no trainer can have its failure."""


STATES: tuple[State, ...] = tuple(TRANSITIONS)


CANCELLED = "cancelled"
"""Kind of the failure of an episode that the trainer does not need any more."""


EPISODE_TYPES: tuple[EpisodeType, ...] = ("train", "eval")


@dataclass(slots=True, kw_only=True, eq=False)
class EpisodeRecord:
    """One episode as the server keeps it. Only `EpisodeBook` and `DeadLetters` change it."""

    uuid: str
    sequence: int
    """Order of registration, unique."""

    episode_type: EpisodeType
    group_id: str
    digest: bytes
    """Of all that a registration says: tells a repeated one from another one with the same uuid."""

    payload: bytes
    """JSON object; dropped once the episode is over and acknowledged."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    """Episodes that the group has in all; 0 if whoever registered did not say."""

    state: State = "registered"
    claimants: list[str] = field(default_factory=list[str])
    """`client_uuid` of each claim, oldest first."""

    request_ids: list[str] = field(default_factory=list[str])
    """`claim_request_id` of each claim, oldest first; empty where the client sent none."""

    forgiven: int = 0
    """Claims made before the last retry: they do not count against `max_attempts`."""

    lease_s: float = 0.0
    claimed_at: float = 0.0
    """Unix time of the last claim; 0 before the first."""

    renewed_at: float = 0.0
    """Last activity of the last claim, on the book's clock; 0 if there was none in this process. Not stored:
    a restart begins every lease anew."""

    ends_at: float = math.inf
    """When the last claim is over however active it is, on the book's clock. Not stored: follows from
    `claimed_at`."""

    calls_in_flight: int = 0
    """Model calls of the last claim that are being answered. Not stored."""

    policy_version: int = 0
    """Of the engine when the last claim was made."""

    reward: float | None = None
    result: bytes = b""
    """JSON of `WorkflowOutput`; dropped at the trainer's acknowledgement."""

    result_digest: bytes = b""
    failures: list[Failure] = field(default_factory=list[Failure])
    offered: bool = False
    """The failure was sent to a trainer, which may have it in its journal whether it has said so or not."""

    acknowledged: bool = False
    """The trainer has the outcome in its journal."""

    dropped: bool = False
    """An operator took the failed episode off the list of dead letters."""

    @property
    def attempt(self) -> int:
        """Number of the last claim; 0 before the first."""
        return len(self.claimants)

    @property
    def client_uuid(self) -> str:
        """Owner of the last claim; empty before the first."""
        return self.claimants[-1] if self.claimants else ""

    @property
    def deadline(self) -> float:
        """When the last claim lapses without further activity, on the book's clock."""
        return min(self.renewed_at + self.lease_s, self.ends_at)


class Claim(NamedTuple):
    """One claim as it was made; unlike its episode it does not change while a reply is on its way."""

    episode_uuid: str
    attempt: int
    client_uuid: str
    episode_type: EpisodeType
    group_id: str
    payload: bytes
    policy_version: int
    lease_s: float
    left_s: float
    """Seconds after which the claim is over, however active it is."""


class ClosedClaim(NamedTuple):
    """A claim that has just lost its lease."""

    episode: EpisodeRecord
    attempt: int
    counts: bool
    """True if it ended with the episode's result: its calls are evidence."""


@dataclass(slots=True)
class Changes:
    """What mutations did since the last `take_changes`."""

    added: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    saved: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    """Changed episodes that were there before, by uuid; none of `added`."""

    closed: list[ClosedClaim] = field(default_factory=list[ClosedClaim])


def content_digest(*parts: bytes) -> bytes:
    """16 bytes that differ for different parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
