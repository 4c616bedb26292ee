"""`Reading`: a read-only connection to a ledger, here SQLite's; `postgres_reader` has PostgreSQL's."""

from __future__ import annotations

import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.rows import LEDGER_VERSION, create_statements


def explained(path: Path | None, error: sqlite3.Error | str) -> str:
    # The low byte is the primary code.
    code = sqlite3.SQLITE_CORRUPT if isinstance(error, str) else getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return f"ledger {path}: {error}"
    return (
        f"ledger {path}: {error}. It is damaged, or was copied while the run wrote to it: copy the ledger of "
        f'a live run with `sqlite3 {LEDGER_FILE} ".backup COPY"`'
    )


class NamedRow(tuple[Any, ...]):
    """Also gives access by column name: `row["step"]`, `dict(row)`."""

    names: tuple[str, ...] = ()

    def __new__(cls, names: tuple[str, ...], values: Iterable[Any]) -> Self:
        row = super().__new__(cls, values)
        row.names = names
        return row

    def keys(self) -> tuple[str, ...]:
        return self.names

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)


Rows = list[NamedRow]


class Reading(ABC):
    is_there = True
    """If false, readers reconnect."""

    @abstractmethod
    def rows(self, query: str, parameters: Sequence[Any]) -> Rows:
        """Raises StoreError."""

    @abstractmethod
    def close(self) -> None: ...


class SqliteReading(Reading):
    def __init__(self, path: Path | None) -> None:
        """Without a path, it is empty. Raises ConfigError for an unreadable file or another version's."""
        self._path = path
        try:
            self._connection = self._opened(path)
        except sqlite3.Error as error:
            raise ConfigError(explained(path, error)) from error

    def _opened(self, path: Path | None) -> sqlite3.Connection:
        self.is_there = False
        if path is not None and path.is_file():
            # SQLite cannot create its index file in a read-only folder.
            mode = "mode=ro" if os.access(path.parent, os.W_OK) else "immutable=1"
            url = f"{path.absolute().as_uri()}?{mode}"
            connection = sqlite3.connect(url, uri=True)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == LEDGER_VERSION:
                self.is_there = True
                return connection
            connection.close()
            if version:
                raise ConfigError(
                    f"{path} has version {version}, and this tinkerscript reads {LEDGER_VERSION}: use the "
                    "version that wrote it"
                )
        empty = sqlite3.connect(":memory:")
        for statement in create_statements():
            empty.execute(statement.replace("{s}", ""))
        return empty

    def rows(self, query: str, parameters: Sequence[Any]) -> Rows:
        try:
            cursor = self._connection.execute(query, tuple(parameters))
            names = tuple(column[0] for column in cursor.description)
            return [NamedRow(names, values) for values in cursor]
        except sqlite3.Error as error:
            raise StoreError(explained(self._path, error)) from error

    def close(self) -> None:
        self._connection.close()


def plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return bytes(value) if isinstance(value, memoryview) else value
