"""`Journal`: the trainer's durable record of every episode, one JSON line an event.

An outcome is acknowledged to the server only after its line is written, so a killed trainer knows
exactly what it had. A line cut short by a kill is the last one and is ignored when reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.call import Call


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the event's tag."""


class EpisodeRegistered(Event, frozen=True):
    episode_uuid: str
    episode_type: str
    group_id: str


class EpisodeAccepted(Event, frozen=True):
    """A result that counts, with the calls of the claim that produced it."""

    episode_uuid: str
    attempt: int
    client_uuid: str
    reward: float
    policy_version_at_claim: int
    calls: list[Call]
    metadata: dict[str, object] = {}
    log_metrics: dict[str, float] = {}
    retries: list[dict[str, object]] = []
    """The failures of the attempts before this one."""


class EpisodeFailed(Event, frozen=True):
    episode_uuid: str
    failures: list[dict[str, object]]


class StepConsumed(Event, frozen=True):
    """These episodes were trained on, or looked at and left out, in this step."""

    step: int
    episode_uuids: list[str]


class PolicyPublished(Event, frozen=True):
    policy_version: int


AnyEvent = EpisodeRegistered | EpisodeAccepted | EpisodeFailed | StepConsumed | PolicyPublished
Outcome = EpisodeAccepted | EpisodeFailed

_decoder = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


class Journal:
    """Append-only; every `write` is in the operating system's hands when it returns. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)
        self.registered: dict[str, str] = {}
        """Episode uuid -> type, of every episode registered."""

        self.outcomes: dict[str, str] = {}
        """Episode uuid -> `accepted` or `failed`."""

        self.retries = 0
        """Attempts that failed before their episode was accepted."""

    def write(self, events: Iterable[AnyEvent]) -> None:
        """Append events with one system call, then count them."""
        events = list(events)
        self._file.write(b"".join(_encoder.encode(event) + b"\n" for event in events))
        for event in events:
            self._count(event)

    def _count(self, event: AnyEvent) -> None:
        if isinstance(event, EpisodeRegistered):
            self.registered[event.episode_uuid] = event.episode_type
        elif isinstance(event, EpisodeAccepted):
            self.outcomes[event.episode_uuid] = "accepted"
            self.retries += len(event.retries)
        elif isinstance(event, EpisodeFailed):
            self.outcomes[event.episode_uuid] = "failed"

    def ended(self, episode_uuid: str) -> bool:
        return episode_uuid in self.outcomes

    def count(self, episode_type: str, outcome: str) -> int:
        """Episodes of one type that ended so."""
        return sum(
            self.registered.get(uuid) == episode_type for uuid, o in self.outcomes.items() if o == outcome
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_journal(path: Path) -> list[AnyEvent]:
    """Every whole line of a journal. Raises ConfigError for a broken line that is not the last."""
    lines = path.read_bytes().split(b"\n")
    events: list[AnyEvent] = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut short
        try:
            events.append(_decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number} is not a journal event: {error}") from error
    return events


def lost_episodes(journal: Journal, server_outcomes: Mapping[str, str] | None) -> list[str]:
    """Registered episodes that neither ended as accepted nor as failed, in both records.

    `server_outcomes` maps episode uuid -> `accepted` or `failed` from the server's own file; None
    without a server. An episode on which the two disagree is lost.
    """
    return [
        uuid
        for uuid in journal.registered
        if uuid not in journal.outcomes
        or (server_outcomes is not None and server_outcomes.get(uuid) != journal.outcomes[uuid])
    ]
