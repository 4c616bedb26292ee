"""`Journal`: the trainer's durable record of every episode, one JSON line per event.

Invariant: an outcome is acknowledged to the server only after its line is written, so a restarted trainer
knows exactly what it had received. A written line survives a killed process and, with `durable`, a power cut.
Only the last line can be cut short by a kill; it is ignored when reading and removed before anything is
appended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from tinkerscript.errors import ConfigError
from tinkerscript.protocol import EpisodeType, bounded
from tinkerscript.rollouts.call import calls_of, full_prompts
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the event's tag."""


class RunBegun(Event, frozen=True):
    """The first event of a journal: which run it is of (`files.RUN_ID`)."""

    run: str


class EpisodeRegistered(Event, frozen=True):
    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    step: int = 0
    """Training step that the episode is for; 0 for evaluations and clients' own samples."""

    position: int = -1
    """Of its sample in the training order; -1 if it has none."""


class Discarded(Event, frozen=True):
    """These episodes ended but are not trained on."""

    episode_uuids: list[str]
    reason: str


class SetAside(Event, frozen=True):
    """The run stopped before this step because of these episodes: misaligned, or all failed.

    They never train; the resumed step gets fresh ones.
    """

    step: int
    episode_uuids: list[str]
    reason: str


class StepConsumed(Event, frozen=True):
    """This step trained on these episodes, or considered them and left them out."""

    step: int
    episode_uuids: list[str]
    """New in this step. No step consumes them again."""

    trained: list[list[str]] = []
    """The groups whose gradients the step used, as the uuids of their episodes: new ones with different
    rewards and no error, and replayed ones of earlier steps."""

    trained_by_role: dict[str, list[list[str]]] = {}
    """The same of each role that trains."""


class PolicyPublished(Event, frozen=True):
    policy_version: int
    step: int = 0
    """Training steps behind these weights."""


class Evaluated(Event, frozen=True):
    """The score of a policy version on evaluation samples."""

    label: str
    step: int
    policy_version: int
    score: float | None
    """Mean reward of the accepted episodes; None if there are none."""

    accepted: int
    failed: int
    """Episodes without a score; not part of the mean."""

    role_scores: dict[str, float] = {}
    """Of roles that train: mean reward of the accepted episodes that called it."""


class Checkpointed(Event, frozen=True):
    """Weights and optimizer state after this step are on disk."""

    step: int
    policy_version: int
    report: dict[str, object] = {}
    """The alignment report at this step."""

    role_reports: dict[str, dict[str, object]] = {}
    """Those of the roles that train."""

    train_seconds: float = 0.0


class Resumed(Event, frozen=True):
    """The run continues from the checkpoint of this step; later steps are undone."""

    step: int


AnyEvent = (
    RunBegun
    | EpisodeRegistered
    | EpisodeAccepted
    | EpisodeFailed
    | Discarded
    | SetAside
    | StepConsumed
    | PolicyPublished
    | Evaluated
    | Checkpointed
    | Resumed
)

QUARANTINED = "reward_out_of_bounds"
"""Failure kind of a recorded result whose reward would end the run (`errors.MAX_REWARD`)."""

UNREADABLE = "calls_unreadable"
"""Failure kind of a recorded result whose calls are not one after another, and cannot be merged."""


def usable(outcome: Outcome) -> Outcome:
    """The outcome as training may see it: a result with a reward out of bounds, or calls that cannot be
    merged, is a failure.

    The journal keeps the result itself.
    """
    if isinstance(outcome, EpisodeFailed):
        return outcome
    kind = QUARANTINED
    try:
        for name, reward in {"reward": outcome.reward, **outcome.role_rewards}.items():
            bounded(name, reward)
        kind = UNREADABLE
        for role in {call.role for call in outcome.all_calls}:
            full_prompts(calls_of(outcome.all_calls, role))
    except ValueError as error:
        failure: dict[str, object] = {
            "kind": kind,
            "message": str(error),
            "attempt": outcome.attempt,
            "client_uuid": outcome.client_uuid,
        }
        fields = (name for name in EpisodeFailed.__struct_fields__ if name != "failures")
        shared = {name: getattr(outcome, name) for name in fields}
        return EpisodeFailed(failures=[*outcome.retries, failure], **shared)
    return outcome


_decoder = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


class Journal:
    """Append-only. When `write` returns, the operating system has the data. Use as a context manager."""

    def __init__(self, path: Path, *, durable: bool = False, run_id: str = "") -> None:
        """Continues the journal at `path`, if there is one. `durable`: sync every write to disk. `run_id`:
        the run that a new one is of.

        Raises ConfigError for a broken line other than the last.
        """
        self.registered: dict[str, EpisodeRegistered] = {}
        """By episode uuid."""

        self.outcomes: dict[str, str] = {}
        """Episode uuid -> `accepted` or `failed`."""

        self.retries = 0
        """Failed attempts of episodes that were accepted later."""

        self.policy_version = -1
        """The highest one that was published; -1 before the first."""

        self.discarded = 0
        """Episodes that ended and were left out for a reason of their own, not their group's."""

        self.cancelled = 0
        """Episodes cancelled because they were no longer needed."""

        self._durable = durable
        if path.exists():
            _remove_partial_line(path)
            for event in read_journal(path):
                self._count(event)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._first = [RunBegun(run=run_id)] if run_id and not self._file.tell() else []

    def write(self, events: Iterable[AnyEvent], *, durable: bool = False) -> None:
        """Append events; `durable`: sync them to disk in any case. Raises OSError if the disk is full."""
        kept = (each.without_extras() if isinstance(each, Outcome) else each for each in events)
        events = [*self._first, *kept]
        data = memoryview(b"".join(_encoder.encode(event) + b"\n" for event in events))
        while data:  # A disk that is nearly full accepts only part of it.
            data = data[self._file.write(data) :]
        if durable or self._durable:
            os.fsync(self._file.fileno())
        self._first = []
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
            case PolicyPublished():
                self.policy_version = max(self.policy_version, event.policy_version)
            case Discarded() | SetAside():
                self.discarded += len(event.episode_uuids)
            case _:
                pass

    def ended(self, episode_uuid: str) -> bool:
        return episode_uuid in self.outcomes

    def unfinished(self) -> list[EpisodeRegistered]:
        """Registered episodes without an outcome."""
        return [event for uuid, event in self.registered.items() if uuid not in self.outcomes]

    def count(self, episode_type: str, outcome: str, *, planned_only: bool = False) -> int:
        """Episodes of a type with this outcome; `planned_only`: those that a step planned."""
        ended = (self.registered.get(uuid) for uuid, how in self.outcomes.items() if how == outcome)
        return sum(
            event is not None and event.episode_type == episode_type and (event.step > 0 or not planned_only)
            for event in ended
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _remove_partial_line(path: Path) -> None:
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)


def read_journal(path: Path, *, size: int = -1) -> list[AnyEvent]:
    """The events of a journal, or of its first `size` bytes. Raises ConfigError for a broken line other than
    the last."""
    with path.open("rb") as file:
        lines = file.read(size).split(b"\n")
    events: list[AnyEvent] = []
    for number, line in enumerate(lines[:-1], start=1):  # Whatever follows the last newline was cut short.
        try:
            events.append(_decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number} is not a journal event: {error}") from error
    return events


def lost_episodes(journal: Journal, server_outcomes: Mapping[str, str] | None) -> list[str]:
    """Registered episodes without an outcome, or whose outcomes differ between journal and server.

    `server_outcomes`: episode uuid -> `accepted` or `failed`; None without a server.
    """
    return [
        uuid
        for uuid in journal.registered
        if uuid not in journal.outcomes
        or (server_outcomes is not None and server_outcomes.get(uuid) != journal.outcomes[uuid])
    ]
