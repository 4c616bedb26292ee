from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import accumulate

from tinkerscript.ledger.ledger import Ledger
from tinkerscript.ledger.rows import TABLES

logger = logging.getLogger(__name__)

LARGE = {kind.TABLE: kind.PACKED for kind in TABLES if kind.PACKED}

LOW_MARK = 0.95  # Share of the limit to shrink to.

DROPPED_AT_ONCE = 200

# Resuming falls back to this checkpoint if the newest is damaged.
_LAST_NEEDED = "SELECT step FROM {s}checkpoints WHERE undone = 0 ORDER BY step DESC LIMIT 1 OFFSET 1"

_OLDEST = """
SELECT sequence, uuid FROM {s}episodes WHERE consumed = 1 AND emptied = 0
    AND NOT EXISTS (SELECT 1 FROM {s}trained WHERE episode = sequence AND undone = 0 AND step > ?)
    ORDER BY end_number LIMIT ?
"""


class StorageLimit:
    def __init__(
        self,
        ledger: Ledger,
        limit_mb: int,
        *,
        replay_lag: int = 0,
        empty: Callable[[Sequence[str]], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """`limit_mb` is in MiB (0: no limit).

        `replay_lag`: episodes of so many steps before a checkpoint may still train after it. `empty` gets
        uuids to empty, and returns those that may be (None: all).
        """
        self._ledger = ledger
        self._limit = limit_mb * 2**20
        self._replay_lag = replay_lag
        self._empty = empty
        self._counted: int | None = None
        self._put_then = 0
        self._is_at_work = False
        self._is_in_vain = False

    @property
    def is_reached(self) -> bool:
        return bool(self._limit) and not self._is_at_work and self._may_be_over

    @property
    def _may_be_over(self) -> bool:
        if self._is_in_vain:  # Counting reads whole tables.
            return self._ledger.bytes_put - self._put_then > self._limit * (1 - LOW_MARK)
        return self._counted is None or self._stored > self._limit

    async def keep(self) -> None:
        if not self.is_reached:
            return
        self._is_at_work = True
        try:
            await self._count()
            is_full = self._stored > self._limit
            while is_full and self._stored > self._limit * LOW_MARK and await self._drop():
                pass
            self._is_in_vain = self._stored > self._limit
        finally:
            self._is_at_work = False

    @property
    def _stored(self) -> int:
        """Upper bound: some new rows replaced others."""
        return (self._counted or 0) + self._ledger.bytes_put - self._put_then

    async def _count(self) -> None:
        await self._ledger.durable()
        self._put_then, self._counted = self._ledger.bytes_put, 0
        for table, column in LARGE.items():
            query = f"SELECT coalesce(sum(length({column})), 0) FROM {{s}}{table}"
            ((size,),) = await self._ledger.read(query)
            self._counted += int(size)

    async def _drop(self) -> bool:
        checkpoints = await self._ledger.read(_LAST_NEEDED)
        last = (checkpoints[0][0] if checkpoints else 0) - self._replay_lag
        found = await self._ledger.read(_OLDEST, (last, DROPPED_AT_ONCE))
        if not found:
            return False
        sizes, among = Counter[int](), _among(sequence for sequence, _ in found)
        for table, column in LARGE.items():
            query = f"SELECT episode, sum(length({column})) FROM {{s}}{table} WHERE episode IN {among} "
            for sequence, size in await self._ledger.read(f"{query} GROUP BY episode"):
                sizes[sequence] += int(size)
        too_much = self._stored - self._limit * LOW_MARK
        freed = [0, *accumulate(sizes[sequence] for sequence, _ in found)]
        found = [each for each, before in zip(found, freed, strict=False) if before < too_much]
        uuids: Collection[str] = [uuid for _, uuid in found]
        if self._empty is not None:
            uuids = await self._empty(uuids)
        # No await before the writes: a resuming trainer could start to use these episodes.
        chosen = [sequence for sequence, uuid in found if uuid in uuids]
        if not chosen:
            return False
        among = _among(chosen)
        for table, column in LARGE.items():
            self._ledger.execute(f"UPDATE {{s}}{table} SET {column} = ? WHERE episode IN {among}", b"")
        self._ledger.execute(f"UPDATE {{s}}episodes SET emptied = 1 WHERE sequence IN {among}")
        await self._ledger.durable()
        size = sum(sizes[each] for each in chosen)
        assert self._counted is not None
        self._counted -= size
        logger.info("ledger.emptied episodes=%d bytes=%d", len(chosen), size)
        return True


def _among(sequences: Iterable[int]) -> str:
    return f"({', '.join(str(int(each)) for each in sequences)})"
