"""`LedgerReader` reads a run's ledger for people, from any thread, while the run writes.

It opens only a ledger in the run's folder or one that the user names, because a stranger's run folder could
name any database.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.files import CONFIG_FILE, RUN_ID, load_yaml
from tinkerscript.ledger import file_of, is_shared
from tinkerscript.ledger.compression import DICTIONARIES, Dictionaries, unpacked
from tinkerscript.ledger.ledger import CALLS_OF_CLAIM, decoded
from tinkerscript.ledger.reading import NamedRow, Reading, Rows, SqliteReading
from tinkerscript.ledger.tokens import TrainedSequence, unpacked_sequences
from tinkerscript.rollouts.call import Call

# Names a ledger outside of the run's folder that the user consents to read.
STORE_VARIABLE = "TINKERSCRIPT_STORE"

# The fact with the trainer's status; see `train.run_status`.
STATUS = "status"

MAX_CONFIG_BYTES = 2**20


class LedgerReader:
    def __init__(self, folder: Path, *, store: str = "") -> None:
        """`store` is the config's `interchange_server.store`. Empty: the one in the folder's config, if it is
        a file in the folder or equals the user's environment variable.

        Raises ConfigError without a run, or for an unreadable ledger or another version's. Until the ledger
        exists, queries return nothing.
        """
        self.folder = folder
        self._config: tuple[int, dict[str, Any]] | None = None
        # Supervised training has no server; its ledger is in its folder.
        is_sft = self.config.get("method") == "sft"
        self._store = "sqlite" if is_sft else store or self._stated_store()
        self._connect = self._opener()
        self._of_thread = threading.local()
        self._dictionaries = Dictionaries(self._read_dictionaries)
        self.rows("SELECT 1")

    @property
    def config(self) -> dict[str, Any]:
        """The run's config, reread when it changes."""
        path = self.folder / CONFIG_FILE
        try:
            changed = path.stat().st_mtime_ns
        except OSError as error:
            raise ConfigError(f"{self.folder} is not the folder of a run: {error}") from error
        if self._config is None or changed != self._config[0]:
            self._config = changed, _read_config(path)
        return self._config[1]

    def setting(self, section: str, name: str) -> Any:
        found = self.config.get(section)
        return cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None

    def _stated_store(self) -> str:
        stated = str(self.setting("interchange_server", "store") or "sqlite")
        named = os.environ.get(STORE_VARIABLE, "")
        if stated not in ("sqlite", named):
            hidden = stated.rpartition("@")[2]
            raise ConfigError(
                f"{self.folder}: its config.yaml names the ledger {hidden}, which a folder from elsewhere "
                f"could do to read any database: if it is yours, set {STORE_VARIABLE} to the run's "
                "interchange_server.store"
            )
        return stated

    def _opener(self) -> Callable[[], Reading]:
        if is_shared(self._store):
            try:
                from tinkerscript.ledger.postgres_reader import PostgresReading  # noqa: PLC0415 - An extra.
            except ImportError as error:
                raise ConfigError(
                    f"the ledger of {self.folder} is in PostgreSQL, which needs psycopg ({error}): "
                    "pip install 'tinkerscript[postgres]'"
                ) from error
            return lambda: PostgresReading(self._store, self.folder)
        return lambda: SqliteReading(file_of(self._store, self.folder))

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> Rows:
        """The SELECT must suit both databases."""
        found: Reading | None = getattr(self._of_thread, "reading", None)
        if found is None or not found.is_there:
            found = self._of_thread.reading = self._connect()
        return found.rows(query, parameters)

    def row(self, query: str, parameters: Sequence[Any] = ()) -> NamedRow | None:
        found = self.rows(query, parameters)
        return found[0] if found else None

    def number(self, query: str, parameters: Sequence[Any] = ()) -> float | None:
        found = self.row(query, parameters)
        return None if found is None else found[0]

    def unpacked(self, data: bytes, *, limit: int | None = None) -> bytes:
        return unpacked(data, self._dictionaries, limit=limit)

    def _read_dictionaries(self) -> list[bytes]:
        return [bytes(content) for _, content in self.rows(DICTIONARIES.replace("{s}", ""))]

    def status(self) -> dict[str, Any]:
        found = self.row("SELECT value FROM facts WHERE name = ?", (STATUS,))
        said: Any = json.loads(bytes(found[0])) if found else {}
        return said

    def model(self) -> str:
        return str(self.setting("engine", "model") or "")

    def calls(self, sequence: int, attempt: int) -> list[Call]:
        """Oldest first; empty if dropped. Raises NotRecordedError for data that no server wrote."""
        return self.calls_of(CALLS_OF_CLAIM.replace("{s}", ""), (sequence, attempt))

    def calls_of(self, query: str, parameters: Sequence[Any]) -> list[Call]:
        found = self.rows(query, parameters)
        try:
            return decoded(((bytes(data),) for (data,) in found), self._dictionaries)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise NotRecordedError(f"the ledger holds something else than calls: {error}") from error

    def sequences(self, sequence: int) -> dict[int, list[TrainedSequence]]:
        query = "SELECT step, sequences FROM tokens WHERE episode = ? AND undone = 0 ORDER BY step, role"
        found: dict[int, list[TrainedSequence]] = {}
        try:
            for step, data in self.rows(query, (sequence,)):
                found.setdefault(step, []).extend(self._sequences(data) if data else [])
        except ValueError as error:
            raise NotRecordedError(f"the ledger holds something else than tokens: {error}") from error
        return {step: each for step, each in found.items() if each}

    def _sequences(self, data: bytes) -> list[TrainedSequence]:
        return unpacked_sequences(bytes(data), self._dictionaries)

    def transcribed(self, sequence: int) -> list[int]:
        query = (
            "SELECT attempt FROM transcripts WHERE episode = ? AND length(transcript) > 0 ORDER BY attempt"
        )
        return [attempt for (attempt,) in self.rows(query, (sequence,))]

    def transcript(self, sequence: int, attempt: int) -> bytes:
        """Return the packed transcript (see `unpacked`), or b""."""
        query = "SELECT transcript FROM transcripts WHERE episode = ? AND attempt = ?"
        found = self.row(query, (sequence, attempt))
        return b"" if found is None else bytes(found[0])

    def close(self) -> None:
        self._of_thread.reading.close()
        del self._of_thread.reading


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the config of a run: {error}") from error
    config = load_yaml(text, source=str(path))
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not the config of a run")
    return cast("dict[str, Any]", config)


def is_run(folder: Path) -> bool:
    return (folder / RUN_ID).is_file()


def find_runs(root: Path) -> dict[str, Path]:
    """Return the folder of the run at `root`, or of the runs in it, by name. Raises ConfigError if none."""
    if is_run(root):
        root = root.resolve()
        return {root.name: root}
    found = [path.parent for path in sorted(root.glob(f"*/{RUN_ID}")) if not path.parent.is_symlink()]
    if not found:
        raise ConfigError(f"{root} is not the folder of a run, and has none in it (no {RUN_ID})")
    return {path.name: path for path in found}
