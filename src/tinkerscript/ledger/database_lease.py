"""`DatabaseLease`: the right to serve a run's episodes, as one row in the database.

The row has holder, epoch and expiry, by the database's clock. Who takes it raises the epoch; each transaction
that writes checks its own (`fence`), so nothing is written for an epoch that is over.
Invariant: a holder that the database does not answer gives up before another server may take the lease; one
whose process was stopped learns from its first renewal or write afterwards whether it still leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import AsyncConnection

DATABASE_LEASE_S = 3.0
"""Time without a renewal after which another server may take the lease, in seconds."""

RENEW_S = 0.5
"""Seconds between two renewals."""

LEASE_POLL_S = 0.2
"""Seconds between two looks of a server that waits for the lease."""

LOST_LEASE = "TS001"
"""SQLSTATE of a transaction whose epoch is over."""

LEASE_TABLE = f"""
-- One row, whose key is the epoch: a transaction that locks it FOR KEY SHARE keeps the next leader waiting,
-- who changes the key, but not the renewals, which do not.
CREATE TABLE {{schema}}.lease (
    epoch bigint PRIMARY KEY,
    holder text NOT NULL,
    expires_at timestamptz NOT NULL
);
INSERT INTO {{schema}}.lease VALUES (0, '', '-infinity');
-- First in each transaction that writes: nobody else leads before it ends.
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
"""Creates the lease in a run's schema, and the function that each transaction calls first."""

Connection = AsyncConnection[tuple[Any, ...]]

logger = logging.getLogger(__name__)

TIMEOUTS = b"SET LOCAL lock_timeout = '2s'; SET LOCAL idle_in_transaction_session_timeout = '2s'"
"""Of a transaction: nobody waits long for a server that is stopped in one."""


class DatabaseLease:
    """Takes the lease, and renews it in a task of its own until it is lost or released."""

    def __init__(
        self, connection: Connection, schema: str, *, holder: str, lost: Callable[[str], None]
    ) -> None:
        """`connection`: for the lease alone. `lost(reason)` is called if a lease that was taken is lost."""
        self._connection = connection
        self._schema = schema
        self._holder = holder
        self._lost = lost
        self._epoch = 0
        self._renewing: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        """Runs while the database has not answered a renewal."""

    async def take(self) -> int:
        """Wait until nobody holds the lease, and take it; returns its epoch. Raises psycopg.Error."""
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
            return False  # The transaction of a leader that is late, or another server that takes it.
        if epoch is not None:
            self._epoch = epoch
        return epoch is not None

    async def _keep(self) -> None:
        """Renew until cancelled, or until the lease is lost."""
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
        """Let the lease run out in so many seconds; False if it is another server's now."""
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
        """Let another server have the lease at once. Raises psycopg.Error."""
        self._stop()
        if self._renewing is not None:
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._extend(0)

    async def _value(self, query: str, parameters: tuple[object, ...] = ()) -> Any:
        """The first column of the first row; None without a row."""
        row = await (await self._connection.execute(query.encode(), parameters)).fetchone()
        return None if row is None else row[0]
