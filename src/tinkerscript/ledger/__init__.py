"""The ledger of a run: one database with everything that happened in it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.ledger import Ledger
from tinkerscript.ledger.sqlite import SqliteLedger

__all__ = ["Ledger", "SqliteLedger", "file_of", "is_here", "is_shared", "open_ledger"]

POSTGRES = ("postgresql://", "postgres://")


def is_shared(url: str) -> bool:
    return url.startswith(POSTGRES)


def file_of(url: str, folder: Path) -> Path:
    _, _, path = url.partition("://")
    return Path(path) if path else folder / LEDGER_FILE


def is_here(url: str, folder: Path) -> bool:
    return is_shared(url) or file_of(url, folder).exists()


def open_ledger(url: str, folder: Path, durability: Literal["normal", "full"] = "normal") -> Ledger:
    """Open the ledger that `interchange_server.store` names.

        sqlite                                         ledger.sqlite in the run's folder
        sqlite:///PATH                                 that file
        postgresql://USER@HOST/DATABASE?schema=NAME    that schema; default: one named after the run

    Raises ConfigError for any other URL, StoreError for an unusable ledger.
    """
    if is_shared(url):
        try:
            from tinkerscript.ledger.postgres import PostgresLedger  # noqa: PLC0415 - An extra.
        except ImportError as error:
            raise ConfigError(
                f"interchange_server.store: PostgreSQL needs psycopg ({error}): "
                "pip install 'tinkerscript[postgres]'"
            ) from error
        return PostgresLedger(url, folder, durability=durability)
    scheme, _, _ = url.partition("://")
    if scheme != "sqlite":
        raise ConfigError(
            f"interchange_server.store: there is no store {url!r}; use sqlite, sqlite:///PATH or "
            "postgresql://USER@HOST/DATABASE"
        )
    return SqliteLedger(file_of(url, folder), durability=durability)
