"""What each claim request was answered with, by (`client_uuid`, `claim_request_id`).

Invariant: a request is answered with new claims once; as long as one of them holds, a repetition finds it.
Of requests whose claims are all over only the ids are kept, the latest `remembered`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tinkerscript.server.episode import Episode
from tinkerscript.server.waiting import RequestKey

REMEMBERED = 100_000
"""Answered requests whose claims are over that are told from new ones."""


class ClaimRequests:
    """The index of answered requests. Claims without a request id are not in it."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._held: dict[RequestKey, dict[str, Episode]] = {}
        self._over: OrderedDict[RequestKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held) + len(self._over)

    def restore(self, episodes: Iterable[Episode]) -> None:
        """Fill an empty index from the request ids that are stored with the episodes."""
        over = list[RequestKey]()
        for episode in episodes:
            keys = zip(episode.claimants, episode.request_ids, strict=True)
            for attempt, key in enumerate(keys, 1):
                if not key[1]:
                    continue
                if attempt == episode.attempt and episode.state == "claimed":
                    self.claimed(episode)
                else:
                    over.append(key)
        for key in over:
            if key not in self._held:
                self._remember(key)

    def claimed(self, episode: Episode) -> None:
        """The episode's last claim answers its request."""
        key = _key(episode)
        if key[1]:
            self._held.setdefault(key, {})[episode.uuid] = episode

    def closed(self, episode: Episode) -> None:
        """The episode's last claim is over."""
        key = _key(episode)
        if not key[1]:
            return
        held = self._held[key]
        del held[episode.uuid]
        if not held:
            del self._held[key]
            self._remember(key)

    def answered(self, key: RequestKey) -> list[Episode] | None:
        """The episodes whose claims still hold, in the order of the answer; None for a new request."""
        held = self._held.get(key)
        if held is not None:
            return list(held.values())
        return [] if key in self._over else None

    def _remember(self, key: RequestKey) -> None:
        self._over[key] = None
        self._over.move_to_end(key)
        while len(self._over) > self._remembered:
            self._over.popitem(last=False)


def _key(episode: Episode) -> RequestKey:
    return episode.claimants[-1], episode.request_ids[-1]
