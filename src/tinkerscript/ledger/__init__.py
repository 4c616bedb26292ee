"""The ledger of a run: what happened, in one database. `open_ledger` opens it by the URL in
`interchange_server.store`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.ledger import Ledger
from tinkerscript.ledger.sqlite import SqliteLedger

__all__ = ["Ledger", "SqliteLedger", "is_shared", "open_ledger"]

POSTGRES = ("postgresql://", "postgres://")


def is_shared(url: str) -> bool:
    """Whether servers elsewhere may serve the episodes of the ledger that a URL names."""
    return url.startswith(POSTGRES)


def open_ledger(url: str, folder: Path, durability: Literal["normal", "full"] = "normal") -> Ledger:
    """Open the ledger that `interchange_server.store` names.

        sqlite                                         ledger.sqlite in the run's folder
        sqlite:///PATH                                 that file
        postgresql://USER@HOST/DATABASE?schema=NAME    that schema; without a name, one of the run's

    Raises ConfigError for another URL, and StoreError for a ledger that cannot be used.
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
    scheme, _, path = url.partition("://")
    if scheme != "sqlite":
        raise ConfigError(
            f"interchange_server.store: there is no store {url!r}; use sqlite, sqlite:///PATH or "
            "postgresql://USER@HOST/DATABASE"
        )
    return SqliteLedger(Path(path) if path else folder / LEDGER_FILE, durability=durability)
