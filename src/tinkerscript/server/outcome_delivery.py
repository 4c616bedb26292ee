"""The outcomes of episodes on their way to the trainer.

Invariant: an outcome is offered again and again until it is acknowledged, and at most `window` of them are
on their way at once, however many have gathered while the trainer was away.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from tinkerscript.errors import InterchangeError
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.base import EpisodeStore
from tinkerscript.trainer_link.messages import FailedEpisode, Result, Tagged


class DeliveryWindow:
    """Uuids of ended and failed episodes that the trainer has not acknowledged, oldest first."""

    def __init__(self, *, clock: Callable[[], float], window: int = 256) -> None:
        self._clock = clock
        self._window = window
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._sent: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    def add(self, uuid: str) -> None:
        """The outcome is committed and may be sent."""
        if uuid not in self._sent:
            self._waiting[uuid] = None

    def acknowledged(self, uuid: str) -> None:
        self._waiting.pop(uuid, None)
        self._sent.pop(uuid, None)

    def take(self) -> list[str]:
        """What to send now."""
        taken = list[str]()
        while self._waiting and len(self._sent) < self._window:
            uuid, _ = self._waiting.popitem(last=False)
            self._sent[uuid] = self._clock()
            taken.append(uuid)
        return taken

    def lost(self, sent_before: float | None = None) -> None:
        """What was sent before that time (None: at all) may not have arrived: offer it again, first."""
        late = [uuid for uuid, at in self._sent.items() if sent_before is None or at <= sent_before]
        for uuid in reversed(late):
            del self._sent[uuid]
            self._waiting[uuid] = None
            self._waiting.move_to_end(uuid, last=False)


class ToTrainerLink(Protocol):
    """Where outcomes are sent."""

    connected: bool

    def send(self, message: Tagged) -> None: ...


class OutcomeDelivery:
    """Offers the committed outcomes of the book to the trainer, with their calls from the store."""

    def __init__(
        self, *, book: EpisodeBook, store: EpisodeStore, link: ToTrainerLink, clock: Callable[[], float]
    ) -> None:
        self._book = book
        self._store = store
        self._link = link
        self._clock = clock
        self._window = DeliveryWindow(clock=clock)

    def __len__(self) -> int:
        return len(self._window)

    def add(self, uuids: Iterable[str]) -> None:
        """These episodes are over, and that is committed."""
        for uuid in uuids:
            if not self._book.get(uuid).acknowledged:
                self._window.add(uuid)
        self.offer()

    def acknowledged(self, uuids: Iterable[str]) -> None:
        """The trainer has these; there is room for the next."""
        for uuid in uuids:
            self._window.acknowledged(uuid)
        self.offer()

    def trainer_connected(self) -> None:
        """Nothing that was sent before can be relied on."""
        self._window.lost()
        self.offer()

    def repeat(self, after_s: float) -> None:
        """Offer again what was sent that long ago."""
        self._window.lost(self._clock() - after_s)
        self.offer()

    def withdraw(self, uuid: str) -> None:
        """The episode has no outcome any more: it is tried again."""
        self._window.acknowledged(uuid)
        self.offer()

    def offer(self) -> None:
        """Send what the window has room for."""
        if self._link.connected:
            for uuid in self._window.take():
                episode = self._book.get(uuid)
                if episode.state == "failed" and not episode.offered:
                    self._store.save(self._book.dead_letters.offer(uuid))
                    self._store.after_commit(partial(self._send, uuid))
                else:
                    self._send(uuid)

    def _send(self, uuid: str) -> None:
        episode = self._book.get(uuid)
        if not episode.acknowledged:
            calls = self._store.calls(episode, episode.attempt) if episode.state == "ended" else []
            self._link.send(outcome_of(episode, calls))


def outcome_of(episode: EpisodeRecord, calls: list[Call]) -> Result | FailedEpisode:
    """The message that tells the trainer how an episode ended."""
    failures = json.dumps([failure.model_dump() for failure in episode.failures]).encode()
    if episode.state == "failed":
        return FailedEpisode(
            episode_uuid=episode.uuid,
            episode_type=episode.episode_type,
            group_id=episode.group_id,
            failures=failures,
            pool=episode.pool,
            group_size=episode.group_size,
        )
    if episode.reward is None:
        raise InterchangeError(f"episode {episode.uuid} is {episode.state} and has no result")
    return Result(
        episode_uuid=episode.uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        attempt=episode.attempt,
        client_uuid=episode.client_uuid,
        reward=episode.reward,
        workflow_output=episode.result,
        calls=calls,
        policy_version_at_claim=episode.policy_version,
        failures=failures,
        pool=episode.pool,
        group_size=episode.group_size,
    )
