"""`DatabaseLease`: the right to serve a run's episodes, as one row in the database.

The row has holder, epoch and expiry, by the database's clock. Who takes it raises the epoch; each transaction
that writes checks its own (`fence` in `postgres_schema`), so nothing is written for an epoch that is over.
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

from tinkerscript.errors import StoreError
from tinkerscript.server.store.postgres_schema import FOUNDATION, MIGRATIONS

LEASE_S = 3.0
"""Time without a renewal after which another server may take the lease, in seconds."""

RENEW_S = 0.5
"""Seconds between two renewals."""

POLL_S = 0.2
"""Seconds between two looks of a server that waits for the lease."""

Connection = AsyncConnection[tuple[Any, ...]]

logger = logging.getLogger(__name__)

_TIMEOUTS = "SET LOCAL lock_timeout = '2s'; SET LOCAL idle_in_transaction_session_timeout = '2s'"


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

    async def create(self) -> None:
        """Create the foundation of the run's schema, unless it is there. Raises psycopg.Error."""
        async with self._connection.transaction():
            await self._connection.execute(_TIMEOUTS)
            # Held until the end of this transaction: two servers may start at once.
            await self._connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"tinkerscript {self._schema}",)
            )
            # A role without the right to create schemas can use one that is there.
            if await self._value(f"SELECT to_regnamespace('{self._schema}')") is None:
                await self._connection.execute(f"CREATE SCHEMA {self._schema}".encode())
            if await self._value(f"SELECT to_regclass('{self._schema}.lease')") is None:
                await self._connection.execute(FOUNDATION.format(schema=self._schema).encode())

    async def take(self) -> int:
        """Wait until nobody holds the lease, and take it; returns its epoch.

        Raises psycopg.Error, and StoreError for a schema of a later version than this server's.
        """
        waiting = False
        while not await self._try():
            if not waiting:
                logger.info("lease.waiting schema=%s", self._schema)
                waiting = True
            await asyncio.sleep(POLL_S)
        logger.info("lease.taken schema=%s epoch=%d", self._schema, self._epoch)
        self._renewing = asyncio.create_task(self._keep())
        return self._epoch

    async def _try(self) -> bool:
        try:
            async with self._connection.transaction():
                await self._connection.execute(_TIMEOUTS)
                epoch = await self._value(
                    f"UPDATE {self._schema}.lease SET epoch = epoch + 1, holder = %s, "
                    "expires_at = clock_timestamp() + %s * interval '1 second' "
                    "WHERE expires_at <= clock_timestamp() RETURNING epoch",
                    (self._holder, LEASE_S),
                )
                if epoch is not None:
                    await self._migrate()
        except psycopg.errors.LockNotAvailable:
            return False  # The transaction of a leader that is late, or another server that takes it.
        if epoch is not None:
            self._epoch = epoch
        return epoch is not None

    async def _migrate(self) -> None:
        version = await self._value(f"SELECT coalesce(max(version), 0) FROM {self._schema}.migrations")
        if version > len(MIGRATIONS):
            raise StoreError(
                f"schema {self._schema} has version {version}, and this server knows versions up to "
                f"{len(MIGRATIONS)}: use the version of tinkerscript that made it, or a newer one"
            )
        for number in range(version, len(MIGRATIONS)):
            await self._connection.execute(MIGRATIONS[number].format(schema=self._schema).encode())
            await self._value(
                f"INSERT INTO {self._schema}.migrations (version) VALUES (%s) RETURNING version",
                (number + 1,),
            )
            logger.info("store.migrated schema=%s version=%d", self._schema, number + 1)

    async def _keep(self) -> None:
        """Renew until cancelled, or until the lease is lost."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(RENEW_S)
                silence = f"the database has not renewed the lease within {LEASE_S:g} s"
                self._silence = loop.call_later(LEASE_S - RENEW_S, self._give_up, silence)
                if not await self._extend(LEASE_S):
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
