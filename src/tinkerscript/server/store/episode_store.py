"""The `EpisodeStore` seam: where episodes and model calls outlive the process. `testing.MemoryStore` is the
in-memory fake.

Invariant: nothing is answered before it is committed. Writes from successive turns of the event loop share
one transaction, up to a limit, and so do those that arrive while the previous transaction is being written;
it is written once a turn brings no more. `await durable()` returns, and `after_commit` callbacks run, only
after the commit, in the order of the writes. Reads see committed data only.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

from tinkerscript.errors import StoreError
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.trainer_link.messages import RecordedOutcome

__all__ = ["EpisodeStore", "WriteBatch"]


logger = logging.getLogger(__name__)

GATHERED_TURNS = 8
"""Turns of the event loop whose writes share a transaction."""

GATHERED_WRITES = 64

GATHERED_BYTES = 2**18
"""A transaction of this size waits for nothing more, because SQLite writes it on the event loop."""


@dataclass(slots=True)
class WriteBatch:
    """The writes of one transaction. Records are live: read them before the first `await` of `write`."""

    added: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    """New episodes by uuid, with their payloads."""

    saved: dict[str, EpisodeRecord] = field(default_factory=dict[str, EpisodeRecord])
    """Changed episodes by uuid. Payload, result, calls and transcripts of an acknowledged one are deleted."""

    calls: list[tuple[EpisodeRecord, int, Call]] = field(
        default_factory=list[tuple[EpisodeRecord, int, Call]]
    )
    """Episode, attempt, and the call to append."""

    transcripts: list[tuple[EpisodeRecord, int, bytes]] = field(
        default_factory=list[tuple[EpisodeRecord, int, bytes]]
    )
    """Episode, attempt, and its transcript, which replaces an earlier one."""

    dropped: list[tuple[EpisodeRecord, int]] = field(default_factory=list[tuple[EpisodeRecord, int]])
    """Episode and attempt whose calls are deleted, those in `calls` included."""

    size: int = 0
    """Bytes of the payloads, calls and transcripts, about."""

    callbacks: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    @property
    def has_writes(self) -> bool:
        return bool(self.added or self.saved or self.calls or self.transcripts or self.dropped)

    @property
    def count(self) -> int:
        return sum(map(len, (self.added, self.saved, self.calls, self.transcripts, self.dropped)))

    @property
    def is_empty(self) -> bool:
        return not (self.has_writes or self.callbacks or self.waiters)


class EpisodeStore(ABC):
    """Durable episodes. A store implements the six abstract methods; this class groups the writes.

    A store that several servers share (`is_shared`) lets one of them write at a time: `lead` waits for the
    right to. A server that loses it finds that its store has failed; another server has the episodes now.
    """

    is_shared: ClassVar[bool] = False
    """Whether servers elsewhere may serve the same episodes."""

    def __init__(self) -> None:
        self._batch = WriteBatch()
        self._committing: asyncio.Task[None] | None = None
        """Set from the first write of a batch until no batch is left."""

        self._failure: StoreError | None = None
        self._failed = asyncio.Event()

    @abstractmethod
    async def load(self) -> list[EpisodeRecord]:
        """Every stored episode, in order of registration. Raises StoreError."""

    @abstractmethod
    async def calls(self, claims: Sequence[tuple[EpisodeRecord, int]]) -> list[list[Call]]:
        """The committed calls of each claim (episode and attempt), oldest first. Raises StoreError."""

    @abstractmethod
    async def transcribed(self, episodes: Sequence[EpisodeRecord]) -> set[str]:
        """The uuids of those episodes that have committed transcripts. Raises StoreError."""

    @abstractmethod
    async def transcripts(self, episode: EpisodeRecord) -> dict[int, bytes]:
        """The committed transcripts of an episode by attempt. Raises StoreError."""

    @abstractmethod
    async def outcomes(self, episode_uuids: Sequence[str]) -> dict[str, RecordedOutcome]:
        """The committed state of each of these episodes, by uuid; unknown uuids are left out.

        Raises StoreError.
        """

    @abstractmethod
    async def write(self, batch: WriteBatch) -> None:
        """Commit all writes of `batch`, or none. Called for one batch at a time. Raises StoreError."""

    @abstractmethod
    async def release(self) -> None:
        """Release files and connections. Nothing is called afterwards."""

    async def lead(self) -> int:
        """Wait until this server alone may write; returns the epoch, which grows with every such server.

        0 for a store that is not shared. Raises StoreError.
        """
        return 0

    async def agree(self, name: str, value: bytes) -> bytes:
        """What all servers of these episodes have under `name`: `value`, unless another one was first.

        Raises StoreError.
        """
        return value

    def add(self, episode: EpisodeRecord) -> None:
        """Store a new episode with its payload."""
        batch = self._open_batch()
        batch.added[episode.uuid] = episode
        batch.size += len(episode.payload)

    def save(self, episode: EpisodeRecord) -> None:
        """Store an episode's changes. Once it is acknowledged, its payload, result, calls and transcripts are
        deleted."""
        self._open_batch().saved[episode.uuid] = episode

    def add_call(self, episode: EpisodeRecord, attempt: int, call: Call) -> None:
        """Store one call of one claim."""
        batch = self._open_batch()
        batch.calls.append((episode, attempt, call))
        batch.size += call.size

    def add_transcript(self, episode: EpisodeRecord, attempt: int, transcript: bytes) -> None:
        """Store the transcript of one claim."""
        batch = self._open_batch()
        batch.transcripts.append((episode, attempt, transcript))
        batch.size += len(transcript)

    def drop_calls(self, episode: EpisodeRecord, attempt: int) -> None:
        """Delete the calls of one claim."""
        self._open_batch().dropped.append((episode, attempt))

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback` once all writes so far are committed; never before this call returns."""
        self._open_batch().callbacks.append(callback)

    async def durable(self) -> None:
        """Return once all writes so far are committed. Raises StoreError."""
        if self._failure is not None:
            raise self._failure
        if self._committing is not None:
            future = self._committing.get_loop().create_future()
            self._batch.waiters.append(future)
            await future

    async def failed(self) -> NoReturn:
        """Wait for a commit to fail and raise its StoreError: from then on memory is ahead of the store."""
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    async def close(self) -> None:
        """Commit what is pending, then release the store. Raises a StoreError that was not raised before."""
        known = self._failure
        try:
            if self._committing is not None:
                await asyncio.wait((self._committing,))
        finally:
            await self.release()
        if self._failure is not known and self._failure is not None:
            raise self._failure

    def _open_batch(self) -> WriteBatch:
        if self._failure is not None:
            raise self._failure
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit())
        return self._batch

    async def _commit(self) -> None:
        """Write batch after batch until nothing is pending. It starts in the turn after the first write."""
        while not (batch := self._batch).is_empty:
            await _gathered(batch)
            self._batch = WriteBatch()
            try:
                if self._failure is None and batch.has_writes:
                    await self.write(batch)
            except StoreError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("store.failed")
                self._fail(StoreError(f"episodes could not be written: {error!r}"))
            self._finish(batch)
        self._committing = None

    def _fail(self, error: StoreError) -> None:
        self._failure = self._failure or error
        self._failed.set()

    def _finish(self, batch: WriteBatch) -> None:
        """Schedule callbacks before waiters, so that `durable` returns after the callbacks have run."""
        if self._failure is None:
            loop = asyncio.get_running_loop()
            for callback in batch.callbacks:
                loop.call_soon(callback)
        for waiter in batch.waiters:
            if waiter.done():
                continue
            if self._failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._failure)


async def _gathered(batch: WriteBatch) -> None:
    """Return once a turn of the loop brings no more writes, or there are enough."""
    for _ in range(GATHERED_TURNS):
        if (known := batch.count) >= GATHERED_WRITES or batch.size >= GATHERED_BYTES:
            return
        await asyncio.sleep(0)
        if batch.count == known:
            return
