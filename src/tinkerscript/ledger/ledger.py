"""`Ledger`: what happened in a run, in a database that outlives the process.

Nothing is answered before it is committed. Writes of a few event-loop iterations, or during a commit, share a
transaction. Then callbacks of `after_commit` run and `durable()` returns, in the order of the writes. Reads
see only committed rows.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
import zstandard

from tinkerscript.errors import StoreError
from tinkerscript.ledger.compression import NO_DICTIONARIES, Dictionaries, Packer, trained, unpacked
from tinkerscript.ledger.rows import CallRow, FactRow, ImageRow, Row, columns, key_of
from tinkerscript.rollouts.call import Call, PlacedImage

logger = logging.getLogger(__name__)

# Event-loop iterations that may share a transaction, because SQLite commits on the event loop.
GATHERED_TURNS = 8

GATHERED_WRITES = 64

GATHERED_BYTES = 2**18

R = TypeVar("R", bound=Row)

FILES = "SELECT digest, file FROM {s}images WHERE digest IN ({})"

FILES_AT_ONCE = 1000  # Databases bound a statement's parameters.

CALLS_OF_CLAIM = "SELECT call FROM {s}calls WHERE episode = ? AND attempt = ? ORDER BY number"

_encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode


class Statement(msgspec.Struct, frozen=True):
    """SQL with `?` for parameters and `{s}` before table names."""

    sql: str
    parameters: tuple[Any, ...] = ()


@dataclass(slots=True)
class WriteBatch:
    rows: dict[type[Row], dict[Any, Row]] = field(default_factory=dict[type[Row], dict[Any, Row]])
    """Table -> key -> row; a counter without a key or with `ONCE`."""

    statements: list[Statement] = field(default_factory=list[Statement])
    count: int = 0
    size: int = 0
    callbacks: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    @property
    def is_empty(self) -> bool:
        return not (self.count or self.callbacks or self.waiters)


class Ledger(ABC):
    """Groups the writes; subclasses are databases.

    Of the servers that share a ledger (`is_shared`), only one may write: `lead` waits for that right. A
    ledger that loses it fails.
    """

    is_shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self._batch = WriteBatch()
        self._committing: asyncio.Task[None] | None = None
        self.bytes_put = 0
        self._failure: StoreError | None = None
        self._failed = asyncio.Event()
        self._packer = Packer(self._train)
        self._training = set[asyncio.Task[None]]()

    @abstractmethod
    async def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Raises StoreError."""

    @abstractmethod
    async def write(self, batch: WriteBatch) -> None:
        """Commit all of `batch` or nothing. Never called concurrently."""

    @abstractmethod
    async def release(self) -> None:
        pass

    async def lead(self) -> int:
        """Wait until only this server may write. Returns an epoch higher than any before; 0 if not shared."""
        return 0

    async def agree(self, name: str, value: bytes) -> bytes:
        """Return the first `value` that any server of the run stored under `name`."""
        return value

    async def rows(self, kind: type[R], rest: str = "", parameters: Sequence[Any] = ()) -> list[R]:
        """`rest` follows the table's name in the SELECT."""
        found = await self.read(
            f"SELECT {', '.join(columns(kind))} FROM {{s}}{kind.TABLE} {rest}", parameters
        )
        return [row_of(kind, each) for each in found]

    async def calls(self, claims: Iterable[tuple[int, int]]) -> list[list[Call]]:
        """Calls per claim (episode sequence and attempt), oldest first."""
        found = [self._decoded(await self.read(CALLS_OF_CLAIM, claim)) for claim in claims]
        return await self.filled(found)

    async def filled(self, found: list[list[Call]]) -> list[list[Call]]:
        digests = list(digests_in(call for calls in found for call in calls))
        files: dict[bytes, bytes] = {}
        for begin in range(0, len(digests), FILES_AT_ONCE):
            some = digests[begin : begin + FILES_AT_ONCE]
            rows = await self.read(FILES.format(", ".join("?" * len(some)), s="{s}"), some)
            files |= {bytes(digest): bytes(file) for digest, file in rows}

        return [with_files(calls, files) for calls in found]

    def _decoded(self, rows: Iterable[tuple[bytes]]) -> list[Call]:
        return decoded(rows, self._packer.dictionaries)

    def _use_dictionaries(self, facts: Iterable[tuple[str, bytes]]) -> None:
        for name, content in facts:
            self._packer.use(name.split("/")[1], content)

    def put(self, row: Row) -> None:
        batch = self._open_batch()
        kind = type(row)
        if kind.PACKED:
            data = self._packer.pack(kind.TABLE, getattr(row, kind.PACKED))
            row = msgspec.structs.replace(row, **{kind.PACKED: data})
        found = batch.rows.get(kind)
        if found is None:
            found = batch.rows[kind] = {}
        # A counter lets the database see, and refuse, a duplicate `ONCE` row.
        has_key = kind.KEY and not kind.ONCE
        key = key_of(kind)(row) if has_key else len(found)
        if not (kind.KEEPS_FIRST and key in found):
            found[key] = row
        size = row.size
        batch.count += 1
        batch.size += size
        self.bytes_put += size

    def note(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.put(row)

    async def commit(self, rows: Iterable[Row] = ()) -> None:
        self.note(rows)
        await self.durable()

    def put_call(self, episode: int, attempt: int, call: Call) -> None:
        rows = [ImageRow(digest=sha256(each.data).digest(), file=each.data) for each in call.images]
        self.note(rows)
        images = [PlacedImage(each.start, row.digest) for each, row in zip(call.images, rows, strict=True)]
        self.put(call_row(episode, attempt, msgspec.structs.replace(call, images=images) if rows else call))

    def execute(self, sql: str, *parameters: Any) -> None:
        batch = self._open_batch()
        batch.statements.append(Statement(sql, parameters))
        batch.count += 1

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback` once all writes so far are committed, never before this call returns."""
        self._open_batch().callbacks.append(callback)

    async def durable(self) -> None:
        """Wait until all writes so far are committed."""
        if self._failure is not None:
            raise self._failure
        if self._committing is not None:
            future = self._committing.get_loop().create_future()
            self._batch.waiters.append(future)
            await future

    async def failed(self) -> NoReturn:
        """Wait for a commit to fail, and raise its StoreError.

        Then stop the server, because memory is ahead of the ledger.
        """
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    async def close(self) -> None:
        """Commit pending writes. Raises an error that was not raised before."""
        known = self._failure
        try:
            if self._training:
                await asyncio.wait(self._training)
            if self._committing is not None:
                await asyncio.wait((self._committing,))
        finally:
            await self.release()
        if self._failure is not known and self._failure is not None:
            raise self._failure

    def _train(self, table: str, samples: list[bytes]) -> None:
        async def train() -> None:
            dictionary = await asyncio.to_thread(trained, samples)
            if dictionary and self._failure is None:
                number = zstandard.ZstdCompressionDict(dictionary).dict_id()
                self.put(FactRow(name=f"dictionary/{table}/{number}", value=dictionary))
                self._packer.use(table, dictionary)

        task = asyncio.get_running_loop().create_task(train())
        self._training.add(task)
        task.add_done_callback(self._training.discard)

    def _open_batch(self) -> WriteBatch:
        if self._failure is not None:
            raise self._failure
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit())
        return self._batch

    async def _commit(self) -> None:
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
        call=_encode_call(call),
    )


def row_of(kind: type[R], values: Sequence[Any]) -> R:
    return kind(**dict(zip(columns(kind), values, strict=True)))


def decoded(rows: Iterable[tuple[bytes]], dictionaries: Dictionaries = NO_DICTIONARIES) -> list[Call]:
    """Skips dropped calls. Raises ValueError for anything but calls."""
    return [_decode_call(unpacked(call, dictionaries)) for (call,) in rows if call]


def digests_in(calls: Iterable[Call]) -> set[bytes]:
    return {image.data for call in calls for image in call.images}


def with_files(calls: Iterable[Call], files: Mapping[bytes, bytes]) -> list[Call]:
    def filled(call: Call) -> Call:
        images = [PlacedImage(image.start, files[image.data]) for image in call.images]
        return msgspec.structs.replace(call, images=images)

    return [filled(call) if call.images else call for call in calls]


async def _gathered(batch: WriteBatch) -> None:
    for _ in range(GATHERED_TURNS):
        if (known := batch.count) >= GATHERED_WRITES or batch.size >= GATHERED_BYTES:
            return
        await asyncio.sleep(0)
        if batch.count == known:
            return
