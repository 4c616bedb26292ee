"""`Ledger`: what happened in a run, in a database that outlives the process.

Invariant: nothing is answered before it is committed. Rows from successive turns of the event loop share one
transaction, up to a limit, and so do those that arrive while the previous transaction is being written; it is
written once a turn brings no more. `await durable()` returns, and `after_commit` callbacks run, only after
the commit, in the order of the writes. Reads see committed rows only.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from tinkerscript.errors import StoreError
from tinkerscript.ledger.compression import packed, unpacked
from tinkerscript.ledger.rows import CallRow, Row, columns, key_of
from tinkerscript.rollouts.call import Call

logger = logging.getLogger(__name__)

GATHERED_TURNS = 8
"""Turns of the event loop whose writes share a transaction."""

GATHERED_WRITES = 64

GATHERED_BYTES = 2**18
"""A transaction of this size waits for nothing more, because SQLite writes it on the event loop."""

R = TypeVar("R", bound=Row)

CALLS_OF_CLAIM = "SELECT call FROM {s}calls WHERE episode = ? AND attempt = ? ORDER BY number"

_encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode


class Statement(msgspec.Struct, frozen=True):
    """SQL with `?` for each parameter and `{s}` before each table's name."""

    sql: str
    parameters: tuple[Any, ...] = ()


@dataclass(slots=True)
class WriteBatch:
    """The writes of one transaction: rows, and then statements."""

    rows: dict[type[Row], dict[Any, Row]] = field(default_factory=dict[type[Row], dict[Any, Row]])
    """By table and key, the row that stays; in a table without keys, or whose rows are written `ONCE`, by
    their place."""

    statements: list[Statement] = field(default_factory=list[Statement])
    count: int = 0
    size: int = 0
    """Bytes of what is large in the rows."""

    callbacks: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    @property
    def is_empty(self) -> bool:
        return not (self.count or self.callbacks or self.waiters)


class Ledger(ABC):
    """The tables of `rows`. A database implements the abstract methods; this class groups the writes.

    One server at a time writes in a ledger that several share (`is_shared`): `lead` waits for the right to. A
    server that loses it finds that its ledger has failed; another server has the episodes now.
    """

    is_shared: ClassVar[bool] = False
    """Whether servers elsewhere may serve the same episodes."""

    def __init__(self) -> None:
        self._batch = WriteBatch()
        self._committing: asyncio.Task[None] | None = None
        """Set from the first write of a batch until no batch is left."""

        self.bytes_put = 0
        """Bytes of what is large in the rows that were put."""

        self._failure: StoreError | None = None
        self._failed = asyncio.Event()

    @abstractmethod
    async def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The committed rows that a SELECT finds, with `?` and `{s}` as in a `Statement`. Raises
        StoreError."""

    @abstractmethod
    async def write(self, batch: WriteBatch) -> None:
        """Commit all writes of `batch`, or none. Called for one batch at a time. Raises StoreError."""

    @abstractmethod
    async def release(self) -> None:
        """Release files and connections. Nothing is called afterwards."""

    async def lead(self) -> int:
        """Wait until this server alone may write; returns the epoch, which grows with every such server.

        0 for a ledger that is not shared. Raises StoreError.
        """
        return 0

    async def agree(self, name: str, value: bytes) -> bytes:
        """What all servers of these episodes have under `name`: `value`, unless another one was first.

        Raises StoreError.
        """
        return value

    # Reading

    async def rows(self, kind: type[R], rest: str = "", parameters: Sequence[Any] = ()) -> list[R]:
        """The rows of a table. `rest`: what follows its name in a SELECT."""
        found = await self.read(
            f"SELECT {', '.join(columns(kind))} FROM {{s}}{kind.TABLE} {rest}", parameters
        )
        return [row_of(kind, each) for each in found]

    async def calls(self, claims: Iterable[tuple[int, int]]) -> list[list[Call]]:
        """The calls of each claim (an episode's sequence, and an attempt), oldest first."""
        return [decoded(await self.read(CALLS_OF_CLAIM, claim)) for claim in claims]

    # Writing

    def put(self, row: Row) -> None:
        """Write a row."""
        batch = self._open_batch()
        kind = type(row)
        found = batch.rows.get(kind)
        if found is None:
            found = batch.rows[kind] = {}
        # The database refuses the second of two rows that are written `ONCE`, also within a transaction.
        has_key = kind.KEY and not kind.ONCE
        key = key_of(kind)(row) if has_key else len(found)
        if not (kind.KEEPS_FIRST and key in found):
            found[key] = row
        size = row.size
        batch.count += 1
        batch.size += size
        self.bytes_put += size

    def note(self, rows: Iterable[Row]) -> None:
        """Write rows, in one transaction."""
        for row in rows:
            self.put(row)

    async def commit(self, rows: Iterable[Row] = ()) -> None:
        """Write rows in one transaction; return once they, and all before them, are committed. Raises
        StoreError."""
        self.note(rows)
        await self.durable()

    def put_call(self, episode: int, attempt: int, call: Call) -> None:
        """Write one call of one claim."""
        self.put(call_row(episode, attempt, call))

    def execute(self, sql: str, *parameters: Any) -> None:
        """Run a statement after the rows of its transaction."""
        batch = self._open_batch()
        batch.statements.append(Statement(sql, parameters))
        batch.count += 1

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
        """Wait for a commit to fail and raise its StoreError: from then on memory is ahead of the ledger."""
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    async def close(self) -> None:
        """Commit what is pending, then release the ledger. Raises a StoreError that was not raised before."""
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
                if self._failure is None and batch.count:
                    await self.write(batch)
            except StoreError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("ledger.failed")
                self._fail(StoreError(f"the ledger could not be written: {error!r}"))
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


def call_row(episode: int, attempt: int, call: Call) -> CallRow:
    """A call of a claim as the ledger has it. For one thread."""
    last = call.policy_version_end
    return CallRow(
        episode=episode,
        attempt=attempt,
        role=call.role,
        created=call.created,
        policy_version=call.policy_version,
        last_version=call.policy_version if last is None else last,
        prompt_tokens=len(call.new_prompt) // 4,
        sampled_tokens=len(call.sampled) // 4,
        stop_reason=call.stop_reason,
        call=packed(_encode_call(call)),
    )


def row_of(kind: type[R], values: Sequence[Any]) -> R:
    """A row from its columns, in their order."""
    return kind(**dict(zip(columns(kind), values, strict=True)))


def decoded(rows: Iterable[tuple[bytes]]) -> list[Call]:
    """The calls in rows of one column, without those that were dropped to save room."""
    return [_decode_call(unpacked(call)) for (call,) in rows if call]


async def _gathered(batch: WriteBatch) -> None:
    """Return once a turn of the loop brings no more writes, or there are enough."""
    for _ in range(GATHERED_TURNS):
        if (known := batch.count) >= GATHERED_WRITES or batch.size >= GATHERED_BYTES:
            return
        await asyncio.sleep(0)
        if batch.count == known:
            return
