"""`OutcomeDelivery`: the outcomes of episodes on their way to the trainer.

Invariant: a committed outcome is sent again and again until it is acknowledged, and at most `window` outcomes
are in flight, however many have gathered while no trainer was connected.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable

from tinkerscript.errors import InterchangeError
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.episode_store import EpisodeStore
from tinkerscript.trainer_link.messages import FailedEpisode, Result
from tinkerscript.trainer_link.server_end import ServerLink


class DeliveryWindow:
    """Uuids of episodes whose outcome is not acknowledged, oldest first."""

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

    def remove(self, uuid: str) -> None:
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

    def requeue(self, sent_before: float | None = None) -> None:
        """Move what was sent before that time (None: all of it) to the front, to be sent again."""
        late = [uuid for uuid, at in self._sent.items() if sent_before is None or at <= sent_before]
        for uuid in reversed(late):
            del self._sent[uuid]
            self._waiting[uuid] = None
            self._waiting.move_to_end(uuid, last=False)


class OutcomeDelivery:
    """Sends the book's committed outcomes to the trainer, with their calls from the store."""

    def __init__(
        self, *, book: EpisodeBook, store: EpisodeStore, link: ServerLink, clock: Callable[[], float]
    ) -> None:
        self._book = book
        self._store = store
        self._link = link
        self._clock = clock
        self._window = DeliveryWindow(clock=clock)
        self._has_work = asyncio.Event()

    def __len__(self) -> int:
        return len(self._window)

    async def run(self) -> None:
        """Send what the window has room for, until cancelled. Raises StoreError."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            if self._link.connected:
                await self._send(self._window.take())

    def add(self, uuids: Iterable[str]) -> None:
        """Deliver those of these episodes that are over; their outcomes are committed."""
        for uuid in uuids:
            episode = self._book.get(uuid)
            if episode.state in ("ended", "failed") and not episode.acknowledged:
                self._window.add(uuid)
        self._has_work.set()

    def remove(self, uuids: list[str]) -> None:
        """Stop delivering these episodes: they are acknowledged, or no longer have an outcome."""
        for uuid in uuids:
            self._window.remove(uuid)
        if uuids:
            self._has_work.set()

    def repeat(self, after_s: float | None = None) -> None:
        """Send again what was sent that long ago; None: everything, since the trainer is a new one."""
        self._window.requeue(None if after_s is None else self._clock() - after_s)
        self._has_work.set()

    async def _send(self, uuids: list[str]) -> None:
        episodes = [self._book.get(uuid) for uuid in uuids]
        first_offers = [each for each in episodes if each.state == "failed" and not each.offered]
        for episode in first_offers:
            self._store.save(self._book.offer_failure(episode.uuid))
        if first_offers:
            await self._store.durable()
        ended = [(episode, episode.attempt) for episode in episodes if episode.state == "ended"]
        found = await self._store.calls(ended) if ended else []
        calls = {episode.uuid: each for (episode, _), each in zip(ended, found, strict=True)}
        for episode in episodes:
            if not episode.acknowledged:
                self._link.send(outcome_of(episode, calls.get(episode.uuid, [])))


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
