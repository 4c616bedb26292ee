"""A server whose process ends at the n-th point of the transaction that holds a training step.

Points are before each statement of the transaction, and after its commit; 0: it does not end.
"""

from __future__ import annotations

import functools
import os
import sqlite3
from pathlib import Path
from typing import Any

from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import sqlite
from tinkerscript.ledger.ledger import WriteBatch
from tinkerscript.ledger.rows import StepRow
from tinkerscript.server import process

DEAD = 9


class DyingConnection(sqlite3.Connection):
    """Counts the statements of the transaction that it is to die in."""

    point = 0
    is_armed = False
    passed = 0

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        self._pass()
        cursor = super().execute(sql, *parameters)
        if sql == "COMMIT":
            self._pass()
        return cursor

    def executemany(self, sql: str, parameters: Any) -> sqlite3.Cursor:
        self._pass()
        return super().executemany(sql, parameters)

    @classmethod
    def _pass(cls) -> None:
        cls.passed += cls.is_armed
        if cls.is_armed and cls.passed == cls.point:
            os._exit(DEAD)


class DyingLedger(sqlite.SqliteLedger):
    """Arms its connection for a batch with a training step."""

    async def write(self, batch: WriteBatch) -> None:
        DyingConnection.is_armed = StepRow in batch.rows
        await super().write(batch)
        DyingConnection.is_armed = False


def open_dying_ledger(url: str, folder: Path, durability: str) -> DyingLedger:
    """What the server opens in place of its ledger."""
    assert (url, durability) == ("sqlite", "normal")
    return DyingLedger(folder / LEDGER_FILE)


def main(run_dir: Path, point: int) -> None:
    DyingConnection.point = point
    sqlite.sqlite3.connect = functools.partial(sqlite3.connect, factory=DyingConnection)
    process.open_ledger = open_dying_ledger
    process.run_server(run_dir, exit_with_parent=False, serve_model=False)
