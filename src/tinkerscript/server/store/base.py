"""The `EpisodeStore` seam: where episodes and calls outlive the process. `MemoryStore` is the in-memory fake.

Invariant: nothing is answered before it is committed. All writes of one tick of the event loop share one
transaction; with a thread, all that gather while the one before is written. `await durable()` returns, and
`after_commit` callbacks run, only after it, in the order of the writes. Reading sees what is committed.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NoReturn

from tinkerscript.errors import StoreError
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.waiting import Signal


@dataclass(slots=True)
class WriteBatch:
    """The writes of one transaction; an episode is written as it stands when the transaction begins."""

    added: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    saved: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    calls: list[tuple[EpisodeRecord, int, Call]] = field(
        default_factory=list[tuple[EpisodeRecord, int, Call]]
    )
    dropped: list[tuple[EpisodeRecord, int]] = field(default_factory=list[tuple[EpisodeRecord, int]])
    after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    @property
    def has_writes(self) -> bool:
        return bool(self.added or self.saved or self.calls or self.dropped)


class EpisodeStore(ABC):
    """Durable episodes. The base class groups writes; a store implements `_prepare` and the reading."""

    def __init__(self, *, in_thread: bool = False) -> None:
        """With `in_thread` transactions run in a thread of their own, not on the event loop."""
        self._failed = Signal()
        self._batch = WriteBatch()
        self._scheduled = False
        self._failure: StoreError | None = None
        self._thread = ThreadPoolExecutor(1, "episode-store") if in_thread else None
        self._writing: tuple[WriteBatch, Future[None]] | None = None

    @abstractmethod
    def load(self) -> list[EpisodeRecord]:
        """Every stored episode, in the order of registration. Raises StoreError."""

    @abstractmethod
    def calls(self, episode: EpisodeRecord, attempt: int) -> list[Call]:
        """The committed calls of one claim, oldest first. Raises StoreError."""

    @abstractmethod
    def _prepare(self, batch: WriteBatch) -> Callable[[], None]:
        """What writes all of `batch`, as it stands now, or nothing; it may run in another thread.

        It raises StoreError.
        """

    @abstractmethod
    def close(self) -> None:
        """Commit what is pending and let go of the file."""

    def add(self, episode: EpisodeRecord) -> None:
        """Store a new episode with its payload."""
        self._open().added[episode.uuid] = episode

    def save(self, episode: EpisodeRecord) -> None:
        """Store what changed in an episode. Once acknowledged, its payload, result and calls are dropped."""
        self._open().saved[episode.uuid] = episode

    def add_call(self, episode: EpisodeRecord, attempt: int, call: Call) -> None:
        """Store one call of one claim."""
        self._open().calls.append((episode, attempt, call))

    def drop_calls(self, episode: EpisodeRecord, attempt: int) -> None:
        """Forget the calls of one claim."""
        self._open().dropped.append((episode, attempt))

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback` once everything written so far is committed; never before this call returns."""
        self._open().after.append(callback)

    async def durable(self) -> None:
        """Return once everything written so far is committed. Raises StoreError."""
        if self._failure is not None:
            raise self._failure
        if self._scheduled or self._writing is not None:
            future = asyncio.get_running_loop().create_future()
            self._open().waiting.append(future)
            await future

    async def failed(self) -> NoReturn:
        """Wait for a commit that fails and raise its StoreError: memory is ahead of the disk for good."""
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    def commit(self) -> None:
        """Commit what is pending now, and wait for it. Raises StoreError."""
        self._drain()
        if self._failure is not None:
            raise self._failure

    def _drain(self) -> None:
        if self._writing is not None:
            batch, writing = self._writing
            self._written(batch, writing.exception())
        batch = self._take()
        self._finish(batch, self._write(batch))

    def _end(self) -> None:
        """Write what is pending, without the thread. Raises a StoreError that nobody was told of before."""
        if self._thread is not None:
            self._thread.shutdown()
        known = self._failure
        self._drain()
        if self._failure is not None and self._failure is not known:
            raise self._failure

    def _open(self) -> WriteBatch:
        if self._failure is not None:
            raise self._failure
        if not self._scheduled:
            asyncio.get_running_loop().call_soon(self._commit)
            self._scheduled = True
        return self._batch

    def _take(self) -> WriteBatch:
        batch, self._batch, self._scheduled = self._batch, WriteBatch(), False
        return batch

    def _commit(self) -> None:
        """Write the batch that has gathered; it goes on gathering while the one before is written."""
        if self._writing is not None or not self._scheduled:
            return
        batch = self._take()
        if self._thread is None or not batch.has_writes or self._failure is not None:
            self._finish(batch, self._write(batch))
        else:
            self._write_in(self._thread, batch)

    def _write(self, batch: WriteBatch) -> StoreError | None:
        """Write now; nothing is written after a batch that failed."""
        if self._failure is not None or not batch.has_writes:
            return self._failure
        try:
            self._prepare(batch)()
        except StoreError as error:
            return error
        return None

    def _write_in(self, thread: ThreadPoolExecutor, batch: WriteBatch) -> None:
        loop = asyncio.get_running_loop()
        writing = thread.submit(self._prepare(batch))
        self._writing = batch, writing

        def written() -> None:
            if self._writing is not None and self._writing[1] is writing:
                self._written(batch, writing.exception())
                self._commit()

        writing.add_done_callback(lambda _: _call_soon(loop, written))

    def _written(self, batch: WriteBatch, error: BaseException | None) -> None:
        self._writing = None
        self._finish(batch, error)

    def _finish(self, batch: WriteBatch, error: BaseException | None) -> None:
        """Tell those who wait for the batch."""
        if error is not None:
            self._fail(batch, error)
            return
        for future in batch.waiting:
            if not future.done():
                future.set_result(None)
        for callback in batch.after:
            callback()

    def _fail(self, batch: WriteBatch, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error if isinstance(error, StoreError) else StoreError(f"not written: {error!r}")
            self._failure.__cause__ = None if self._failure is error else error
        for future in batch.waiting:
            if not future.done():
                future.set_exception(self._failure)
        self._failed.fire()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """From the store's thread. A loop that has ended has nobody who waits."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


class MemoryStore(EpisodeStore):
    """Keeps copies in memory: what a restarted server would find."""

    def __init__(self, *, in_thread: bool = False) -> None:
        super().__init__(in_thread=in_thread)
        self._episodes: dict[int, EpisodeRecord] = {}
        self._calls: dict[tuple[int, int], list[Call]] = {}

    def load(self) -> list[EpisodeRecord]:
        return [copy.deepcopy(self._episodes[sequence]) for sequence in sorted(self._episodes)]

    def calls(self, episode: EpisodeRecord, attempt: int) -> list[Call]:
        return list(self._calls.get((episode.sequence, attempt), ()))

    def _prepare(self, batch: WriteBatch) -> Callable[[], None]:
        episodes = [copy.deepcopy(each) for each in (*batch.added.values(), *batch.saved.values())]

        def write() -> None:
            for episode, attempt, call in batch.calls:
                self._calls.setdefault((episode.sequence, attempt), []).append(call)
            for episode, attempt in batch.dropped:
                self._calls.pop((episode.sequence, attempt), None)
            for episode in episodes:
                self._episodes[episode.sequence] = episode
                if episode.acknowledged:
                    self._calls.pop((episode.sequence, episode.attempt), None)

        return write

    def close(self) -> None:
        self._end()
