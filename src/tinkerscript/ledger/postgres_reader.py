from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.ledger.postgres import CONNECT_S, escaped, marked, split_url, unescaped
from tinkerscript.ledger.reading import NamedRow, Reading, Rows, SqliteReading, plain
from tinkerscript.ledger.rows import LEDGER_VERSION


class PostgresReading(Reading):
    """Reads a run's PostgreSQL ledger in read-only transactions."""

    def __init__(self, url: str, folder: Path) -> None:
        conninfo, self._schema = split_url(url, folder)
        self._empty: Reading | None = None
        try:
            self._connection = psycopg.connect(
                conninfo, prepare_threshold=None, connect_timeout=CONNECT_S, application_name="tinkerscript"
            )
            version = self._version()
        except (psycopg.Error, StoreError) as error:
            raise ConfigError(f"the ledger of {folder} cannot be read: {str(error).strip()}") from error
        if version is None:
            self._empty, self.is_there = SqliteReading(None), False
        elif version != str(LEDGER_VERSION):
            raise ConfigError(
                f"the schema {self._schema} has version {version}, and this tinkerscript reads "
                f"{LEDGER_VERSION}: use the version that wrote it"
            )

    def _version(self) -> str | None:
        try:
            ((version,),) = self.rows("SELECT value FROM facts WHERE name = ?", ("version",))
        except StoreError as error:
            self._connection.close()
            if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
                return None
            raise
        return version.decode()

    def rows(self, query: str, parameters: Sequence[Any]) -> Rows:
        if self._empty is not None:
            return self._empty.rows(query, parameters)
        try:
            with self._connection.transaction(), self._connection.cursor(binary=True) as cursor:
                cursor.execute("SET TRANSACTION READ ONLY")
                cursor.execute(f"SET LOCAL search_path TO {self._schema}".encode())
                given = [escaped(each) if isinstance(each, str) else each for each in parameters]
                cursor.execute(marked(query).encode(), given)
                names = tuple(column.name for column in cursor.description or ())
                return [NamedRow(names, map(_plain, values)) for values in cursor.fetchall()]
        except psycopg.Error as error:
            raise StoreError(f"the ledger in the schema {self._schema}: {str(error).strip()}") from error
        finally:
            self.is_there = not self._connection.closed

    def close(self) -> None:
        self._connection.close()

    # Connections are thread-local, and end with their thread.
    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()


def _plain(value: Any) -> Any:
    return unescaped(value) if isinstance(value, str) else plain(value)
