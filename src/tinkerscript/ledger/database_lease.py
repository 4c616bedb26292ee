"""`DatabaseLease`: the right to serve a run's episodes, as one row in the database.

Taking the lease increments its epoch, which every write checks (`fence`), so a former holder cannot write. A
holder without an answer gives up before another server may take it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import AsyncConnection

DATABASE_LEASE_S = 3.0  # Then another server may take it.
RENEW_S = 0.5
LEASE_POLL_S = 0.2
LOST_LEASE = "TS001"  # SQLSTATE of a transaction in a past epoch.

LEASE_TABLE = f"""
-- The row's key is its epoch. A transaction that locks it FOR KEY SHARE blocks the next leader, who changes
-- the key, but not renewals, which do not.
CREATE TABLE {{schema}}.lease (
    epoch bigint PRIMARY KEY,
    holder text NOT NULL,
    expires_at timestamptz NOT NULL
);
INSERT INTO {{schema}}.lease VALUES (0, '', '-infinity');
-- Each writing transaction calls this first: no other server can take the lease before it ends.
CREATE FUNCTION {{schema}}.fence(expected bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('lock_timeout', '2s', true),
        set_config('idle_in_transaction_session_timeout', '2s', true);
    PERFORM FROM {{schema}}.lease WHERE epoch = expected FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'another server serves: epoch % is over', expected USING ERRCODE = '{LOST_LEASE}';
    END IF;
END $$;
"""

Connection = AsyncConnection[tuple[Any, ...]]

logger = logging.getLogger(__name__)

# A server suspended inside a transaction must not block the others for long.
TIMEOUTS = b"SET LOCAL lock_timeout = '2s'; SET LOCAL idle_in_transaction_session_timeout = '2s'"


class DatabaseLease:
    def __init__(
        self, connection: Connection, schema: str, *, holder: str, lost: Callable[[str], None]
    ) -> None:
        """`connection` serves only the lease. `lost(reason)` is called if a held lease is lost."""
        self._connection = connection
        self._schema = schema
        self._holder = holder
        self._lost = lost
        self._epoch = 0
        self._renewing: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None

    async def take(self) -> int:
        """Take the lease and return its epoch. Raises psycopg.Error."""
        waiting = False
        while not await self._try():
            if not waiting:
                logger.info("lease.waiting schema=%s", self._schema)
                waiting = True
            await asyncio.sleep(LEASE_POLL_S)
        logger.info("lease.taken schema=%s epoch=%d", self._schema, self._epoch)
        self._renewing = asyncio.create_task(self._keep())
        return self._epoch

    async def _try(self) -> bool:
        try:
            async with self._connection.transaction():
                await self._connection.execute(TIMEOUTS)
                epoch = await self._value(
                    f"UPDATE {self._schema}.lease SET epoch = epoch + 1, holder = %s, "
                    "expires_at = clock_timestamp() + %s * interval '1 second' "
                    "WHERE expires_at <= clock_timestamp() RETURNING epoch",
                    (self._holder, DATABASE_LEASE_S),
                )
        except psycopg.errors.LockNotAvailable:
            return False  # A slow transaction, or another server taking the lease.
        if epoch is not None:
            self._epoch = epoch
        return epoch is not None

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(RENEW_S)
                silence = f"the database has not renewed the lease within {DATABASE_LEASE_S:g} s"
                self._silence = loop.call_later(DATABASE_LEASE_S - RENEW_S, self._give_up, silence)
                if not await self._extend(DATABASE_LEASE_S):
                    self._give_up(f"another server serves: epoch {self._epoch} is over")
                    return
                self._silence.cancel()
        except psycopg.Error as error:
            self._give_up(f"the lease cannot be renewed: {error}")

    async def _extend(self, seconds: float) -> bool:
        renewed = await self._value(
            f"UPDATE {self._schema}.lease SET expires_at = clock_timestamp() + %s * interval '1 second' "
            "WHERE epoch = %s RETURNING epoch",
            (seconds, self._epoch),
        )
        return renewed is not None

    def _give_up(self, reason: str) -> None:
        self._stop()
        self._lost(reason)

    def _stop(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if self._renewing is not None and self._renewing is not asyncio.current_task():
            self._renewing.cancel()

    async def release(self) -> None:
        self._stop()
        if self._renewing is not None:
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._extend(0)

    async def _value(self, query: str, parameters: tuple[object, ...] = ()) -> Any:
        row = await (await self._connection.execute(query.encode(), parameters)).fetchone()
        return None if row is None else row[0]
