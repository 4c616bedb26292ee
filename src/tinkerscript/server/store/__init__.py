"""Stores of episodes: `open_store` finds one by the URL in `interchange_server.store`.

To add a store, write a module with an `EpisodeStore` (see `episode_store`) and enter it in `STORES`. A store
of your own needs no entry, since the setting also takes `module:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from tinkerscript.config import import_name
from tinkerscript.errors import ConfigError
from tinkerscript.server.store.episode_store import EpisodeStore, WriteBatch
from tinkerscript.server.store.sqlite import STORE_FILE, SqliteStore

__all__ = ["STORES", "EpisodeStore", "StoreOpener", "WriteBatch", "is_shared", "open_store"]

Durability = Literal["normal", "full"]

StoreOpener = Callable[[str, Path, Durability], EpisodeStore]
"""Opens the store of a URL for a run's folder, with the run's `interchange_server.durability`."""


def _open_sqlite(url: str, folder: Path, durability: Durability) -> EpisodeStore:
    """`sqlite`: `server.sqlite` in the run's folder; `sqlite:///PATH`: that file."""
    _, _, path = url.partition("://")
    return SqliteStore(Path(path) if path else folder / STORE_FILE, durability=durability)


def _open_postgres(url: str, folder: Path, durability: Durability) -> EpisodeStore:
    """`postgresql://USER@HOST/DATABASE`; with `?schema=NAME` in that schema, or else in one of the run's."""
    try:
        from tinkerscript.server.store.postgres import PostgresStore
    except ImportError as error:
        raise ConfigError(
            f"interchange_server.store: PostgreSQL needs psycopg ({error}): "
            "pip install 'tinkerscript[postgres]'"
        ) from error
    return PostgresStore(url, folder, durability=durability)


STORES: Mapping[str, StoreOpener] = {
    "sqlite": _open_sqlite,
    "postgresql": _open_postgres,
    "postgres": _open_postgres,
}
"""URL scheme -> what opens such a store."""


def is_shared(url: str) -> bool:
    """Whether servers elsewhere may serve the episodes of the store that a URL names."""
    return url.startswith(("postgresql://", "postgres://"))


def open_store(url: str, folder: Path, durability: Durability) -> EpisodeStore:
    """Open the store that `interchange_server.store` names.

    Raises ConfigError for a URL whose scheme no store has, and StoreError for a store that cannot be used.
    """
    scheme, has_path, _ = url.partition("://")
    opener = STORES.get(scheme)
    if opener is not None:
        return opener(url, folder, durability)
    if has_path or ":" not in url:
        known = ", ".join(STORES)
        raise ConfigError(
            f"interchange_server.store: there is no store {url!r}; use one of {known}, or module:name of a "
            "function that opens one"
        )
    opener = import_name(url, what="interchange_server.store")
    if not callable(opener):
        raise ConfigError(
            f"interchange_server.store: {url!r} is not callable: name a function that opens a store"
        )
    store = opener(url, folder, durability)
    if not isinstance(store, EpisodeStore):
        raise ConfigError(f"interchange_server.store: {url} returned {store!r}, which is not an EpisodeStore")
    return store
