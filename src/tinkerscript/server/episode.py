"""The record of one episode, its states, and the one table of legal moves between them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tinkerscript.protocol import EpisodeType, Failure

State = Literal["registered", "claimed", "ended", "accepted", "failed"]

TRANSITIONS: Mapping[State, frozenset[State]] = {
    "registered": frozenset({"claimed", "failed"}),
    "claimed": frozenset({"registered", "ended", "failed"}),
    "ended": frozenset({"accepted"}),
    "accepted": frozenset(),
    "failed": frozenset(),
}
"""registered -> claimed -> ended -> accepted; a lost claim goes back to registered or on to failed."""

EPISODE_TYPES: tuple[EpisodeType, ...] = ("train", "eval")


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One episode as the server keeps it. Only `EpisodeBook` changes it."""

    uuid: str
    sequence: int
    """Order of registration, unique."""

    episode_type: EpisodeType
    group_id: str
    digest: bytes
    """Of type, group and payload: tells a repeated registration from another one with the same uuid."""

    payload: bytes
    """JSON object; dropped once the episode is over and acknowledged."""

    state: State = "registered"
    claimants: list[str] = field(default_factory=list[str])
    """`client_uuid` of each claim, oldest first."""

    lease_s: float = 0.0
    deadline: float = 0.0
    """When the claim lapses, on the book's clock. Not stored: a restart begins every lease anew."""

    policy_version: int = 0
    """Of the engine when the last claim was made."""

    reward: float | None = None
    result: bytes = b""
    """JSON of `WorkflowOutput`; dropped at the trainer's acknowledgement."""

    result_digest: bytes = b""
    failures: list[Failure] = field(default_factory=list[Failure])
    acknowledged: bool = False
    """The trainer has the outcome in its journal."""

    @property
    def attempt(self) -> int:
        """Number of the last claim; 0 before the first."""
        return len(self.claimants)

    @property
    def client_uuid(self) -> str:
        """Owner of the last claim; empty before the first."""
        return self.claimants[-1] if self.claimants else ""


class ClosedClaim(NamedTuple):
    """A claim that has just lost its lease."""

    episode: Episode
    attempt: int
    counts: bool
    """True if it ended with the episode's result: its calls are evidence."""


@dataclass(slots=True)
class Changes:
    """What mutations did since the last `take_changes`."""

    added: dict[str, Episode] = field(default_factory=dict[str, Episode])
    saved: dict[str, Episode] = field(default_factory=dict[str, Episode])
    """Changed episodes that were there before, by uuid; none of `added`."""

    closed: list[ClosedClaim] = field(default_factory=list[ClosedClaim])


def content_digest(*parts: bytes) -> bytes:
    """16 bytes that differ for different parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
