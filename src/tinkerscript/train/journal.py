"""`Journal`: the trainer's durable record of every episode, one JSON line an event.

An outcome is acknowledged to the server only after its line is written, so a killed trainer knows exactly
what it had. A written line survives a killed process; with `durable` it survives a power cut too. A line cut
short by a kill is the last one: it is ignored when reading, and cut off before anything is appended.
"""

from __future__ import annotations

import os
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
    step: int = 0
    """Training step that the episode is for; 0 for an evaluation, and for a client's own sample."""

    position: int = -1
    """Of its sample in the endless order of training samples; -1 for any other."""


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

    episode_type: str = "train"
    pool: str = ""
    group_id: str = ""
    group_size: int = 0
    """Episodes that the group has in all; 0 if whoever registered it did not say."""


class EpisodeFailed(Event, frozen=True):
    episode_uuid: str
    failures: list[dict[str, object]]
    episode_type: str = "train"
    pool: str = ""
    group_id: str = ""
    group_size: int = 0

    @property
    def is_cancelled(self) -> bool:
        """Whether it was not needed any more, which is nobody's fault."""
        return bool(self.failures) and self.failures[-1].get("kind") == "cancelled"


class Discarded(Event, frozen=True):
    """These episodes ended and are not trained on."""

    episode_uuids: list[str]
    reason: str


class Misaligned(Event, frozen=True):
    """The run stopped before this step: what these episodes hold is not what the trainer computes.

    They do not train when it goes on; the step gets fresh ones.
    """

    step: int
    episode_uuids: list[str]
    reason: str


class StepConsumed(Event, frozen=True):
    """These episodes were trained on, or looked at and left out, in this step."""

    step: int
    episode_uuids: list[str]


class PolicyPublished(Event, frozen=True):
    policy_version: int
    step: int = 0
    """Training steps behind these weights."""


class Evaluated(Event, frozen=True):
    """The score of one policy version on samples that never train."""

    label: str
    step: int
    policy_version: int
    score: float | None
    """Mean reward over the accepted episodes; None if there is none."""

    accepted: int
    failed: int
    """Episodes without a score: reported beside it, never averaged into it."""


class Checkpointed(Event, frozen=True):
    """Weights and optimizer state after this step are on disk."""

    step: int
    policy_version: int
    report: dict[str, object] = {}
    """The alignment report so far."""

    train_seconds: float = 0.0


class Resumed(Event, frozen=True):
    """The run goes on from the checkpoint of this step: what consumed results after it is undone."""

    step: int


AnyEvent = (
    EpisodeRegistered
    | EpisodeAccepted
    | EpisodeFailed
    | Discarded
    | Misaligned
    | StepConsumed
    | PolicyPublished
    | Evaluated
    | Checkpointed
    | Resumed
)
Outcome = EpisodeAccepted | EpisodeFailed

_decoder = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


class Journal:
    """Append-only; every `write` is in the operating system's hands when it returns. A context manager."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """Goes on with the journal that is there. `durable`: each write is synced to the disk.

        Raises ConfigError for a broken line that is not the last.
        """
        self.registered: dict[str, EpisodeRegistered] = {}
        """By episode uuid, every episode registered."""

        self.outcomes: dict[str, str] = {}
        """Episode uuid -> `accepted` or `failed`."""

        self.retries = 0
        """Attempts that failed before their episode was accepted."""

        self.discarded = 0
        """Episodes that ended and were not trained on, for another reason than their group's."""

        self.cancelled = 0
        """Episodes that failed because they were not needed any more."""

        self._durable = durable
        if path.exists():
            _cut_off_half_a_line(path)
            for event in read_journal(path):
                self._count(event)
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, events: Iterable[AnyEvent]) -> None:
        """Append events, then count them. Raises OSError if the disk is full."""
        events = list(events)
        data = memoryview(b"".join(_encoder.encode(event) + b"\n" for event in events))
        while data:  # A disk that is nearly full takes a part.
            data = data[self._file.write(data) :]
        if self._durable:
            os.fsync(self._file.fileno())
        for event in events:
            self._count(event)

    def _count(self, event: AnyEvent) -> None:
        match event:
            case EpisodeRegistered():
                self.registered[event.episode_uuid] = event
            case EpisodeAccepted():
                self.outcomes[event.episode_uuid] = "accepted"
                self.retries += len(event.retries)
            case EpisodeFailed():
                self.outcomes[event.episode_uuid] = "failed"
                self.cancelled += event.is_cancelled
            case Discarded() | Misaligned():
                self.discarded += len(event.episode_uuids)
            case _:
                pass

    def ended(self, episode_uuid: str) -> bool:
        return episode_uuid in self.outcomes

    def unfinished(self) -> list[EpisodeRegistered]:
        """Registered episodes without an outcome."""
        return [event for uuid, event in self.registered.items() if uuid not in self.outcomes]

    def count(self, episode_type: str, outcome: str) -> int:
        """Episodes of one type that ended so."""
        ended = (self.registered.get(uuid) for uuid, how in self.outcomes.items() if how == outcome)
        return sum(event is not None and event.episode_type == episode_type for event in ended)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _cut_off_half_a_line(path: Path) -> None:
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)


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
