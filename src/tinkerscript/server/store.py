"""The `EpisodeStore` seam: where episodes and calls outlive the process. `MemoryStore` is the in-memory fake.

Invariant: nothing is answered before it is committed. All writes of one tick of the event loop share one
transaction (group commit without a thread); `await durable()` returns, and `after_commit` callbacks run,
only after it. Reading sees what is committed.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from tinkerscript.errors import StoreError
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episode import Episode
from tinkerscript.server.waiting import Signal


@dataclass(slots=True)
class Batch:
    """The writes of one transaction; an episode is written as it stands at the commit."""

    added: dict[str, Episode] = field(default_factory=dict[str, Episode])
    saved: dict[str, Episode] = field(default_factory=dict[str, Episode])
    calls: list[tuple[Episode, int, Call]] = field(default_factory=list[tuple[Episode, int, Call]])
    dropped: list[tuple[Episode, int]] = field(default_factory=list[tuple[Episode, int]])
    after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    @property
    def has_writes(self) -> bool:
        return bool(self.added or self.saved or self.calls or self.dropped)


class EpisodeStore(ABC):
    """Durable episodes. The base class groups writes; a store implements `_write` and the reading."""

    def __init__(self) -> None:
        self._failed = Signal()
        self._batch = Batch()
        self._scheduled = False
        self._failure: StoreError | None = None

    @abstractmethod
    def load(self) -> list[Episode]:
        """Every stored episode, in the order of registration. Raises StoreError."""

    @abstractmethod
    def calls(self, episode: Episode, attempt: int) -> list[Call]:
        """The committed calls of one claim, oldest first. Raises StoreError."""

    @abstractmethod
    def _write(self, batch: Batch) -> None:
        """Write all of `batch` or nothing; raises StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Commit what is pending and let go of the file."""

    def add(self, episode: Episode) -> None:
        """Store a new episode with its payload."""
        self._open().added[episode.uuid] = episode

    def save(self, episode: Episode) -> None:
        """Store what changed in an episode. Once acknowledged, its payload, result and calls are dropped."""
        self._open().saved[episode.uuid] = episode

    def add_call(self, episode: Episode, attempt: int, call: Call) -> None:
        """Store one call of one claim."""
        self._open().calls.append((episode, attempt, call))

    def drop_calls(self, episode: Episode, attempt: int) -> None:
        """Forget the calls of one claim."""
        self._open().dropped.append((episode, attempt))

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback` once everything written so far is committed; never before this call returns."""
        self._open().after.append(callback)

    async def durable(self) -> None:
        """Return once everything written so far is committed. Raises StoreError."""
        if self._failure is not None:
            raise self._failure
        if self._scheduled:
            future = asyncio.get_running_loop().create_future()
            self._batch.waiting.append(future)
            await future

    async def failed(self) -> NoReturn:
        """Wait for a commit that fails and raise its StoreError: memory is ahead of the disk for good."""
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    def commit(self) -> None:
        """Commit what is pending now. Raises StoreError."""
        self._commit()
        if self._failure is not None:
            raise self._failure

    def _open(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        if not self._scheduled:
            asyncio.get_running_loop().call_soon(self._commit)
            self._scheduled = True
        return self._batch

    def _commit(self) -> None:
        batch, self._batch, self._scheduled = self._batch, Batch(), False
        try:
            if batch.has_writes:
                self._write(batch)
            for future in batch.waiting:
                if not future.done():
                    future.set_result(None)
            for callback in batch.after:
                callback()
        except StoreError as error:
            self._fail(batch, error)

    def _fail(self, batch: Batch, error: StoreError) -> None:
        self._failure = error
        for future in batch.waiting:
            if not future.done():
                future.set_exception(error)
        self._failed.fire()


class MemoryStore(EpisodeStore):
    """Keeps copies in memory: what a restarted server would find."""

    def __init__(self) -> None:
        super().__init__()
        self._episodes: dict[int, Episode] = {}
        self._calls: dict[tuple[int, int], list[Call]] = {}

    def load(self) -> list[Episode]:
        return [copy.deepcopy(self._episodes[sequence]) for sequence in sorted(self._episodes)]

    def calls(self, episode: Episode, attempt: int) -> list[Call]:
        return list(self._calls.get((episode.sequence, attempt), ()))

    def _write(self, batch: Batch) -> None:
        for episode, attempt, call in batch.calls:
            self._calls.setdefault((episode.sequence, attempt), []).append(call)
        for episode, attempt in batch.dropped:
            self._calls.pop((episode.sequence, attempt), None)
        for episode in (*batch.added.values(), *batch.saved.values()):
            self._episodes[episode.sequence] = copy.deepcopy(episode)
            if episode.acknowledged:
                self._calls.pop((episode.sequence, episode.attempt), None)

    def close(self) -> None:
        self._commit()
