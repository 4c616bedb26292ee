"""`LedgerReader`: a run's ledger for people to read, by any number of threads, while the run goes on.

Invariant: it cannot write, and it opens nothing but what the run's folder holds or the user names: a folder
from elsewhere could name any database.
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
from tinkerscript.ledger.ledger import CALLS_OF_CLAIM, decoded
from tinkerscript.ledger.reading import NamedRow, Reading, Rows, SqliteReading
from tinkerscript.ledger.tokens import TrainedSequence, unpacked_sequences
from tinkerscript.rollouts.call import Call

STORE_VARIABLE = "TINKERSCRIPT_STORE"
"""Environment variable: the `interchange_server.store` of the runs that are read, unless it is a file in the
run's folder."""

STATUS = "status"
"""Name of the fact that holds what the trainer does now, as JSON; see `train.run_status`."""

MAX_CONFIG_BYTES = 2**20


class LedgerReader:
    """The ledger of the run in a folder."""

    def __init__(self, folder: Path, *, store: str = "") -> None:
        """`store`: the config's `interchange_server.store`; empty: what the folder's config says, if it is in
        the folder, or the user's environment says the same.

        Raises ConfigError for a folder without a run, and for a ledger of another version or that cannot be
        read. Before the ledger is there, the run has nothing to read.
        """
        self.folder = folder
        self._config: tuple[int, dict[str, Any]] = (0, {})
        # Supervised fine-tuning has no server, and its ledger is always in its folder.
        is_sft = self.config.get("method") == "sft"
        self._store = "sqlite" if is_sft else store or self._stated_store()
        self._connect = self._opener()
        self._of_thread = threading.local()
        self.rows("SELECT 1")

    @property
    def config(self) -> dict[str, Any]:
        """The run's config as it is now; a resumption may change it. Raises ConfigError."""
        path = self.folder / CONFIG_FILE
        try:
            changed = path.stat().st_mtime_ns
        except OSError as error:
            raise ConfigError(f"{self.folder} is not the folder of a run: {error}") from error
        if changed != self._config[0]:
            self._config = changed, _read_config(path)
        return self._config[1]

    def setting(self, section: str, name: str) -> Any:
        """A value in a section of the config; None if it is not there."""
        found = self.config.get(section)
        return cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None

    def _stated_store(self) -> str:
        stated = str(self.setting("interchange_server", "store") or "sqlite")
        named = os.environ.get(STORE_VARIABLE, "")
        if stated not in ("sqlite", named):
            hidden = stated.rpartition("@")[2]
            raise ConfigError(
                f"{self.folder}: its config.yaml names the ledger {hidden}, and a folder from elsewhere "
                f"could name any: if it is yours, set {STORE_VARIABLE} to the run's interchange_server.store"
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
        """What a SELECT finds, with `?` for each parameter, in SQL that both databases know."""
        found: Reading | None = getattr(self._of_thread, "reading", None)
        if found is None or not found.is_there:
            found = self._of_thread.reading = self._connect()
        return found.rows(query, parameters)

    def row(self, query: str, parameters: Sequence[Any] = ()) -> NamedRow | None:
        """The first row."""
        found = self.rows(query, parameters)
        return found[0] if found else None

    def number(self, query: str, parameters: Sequence[Any] = ()) -> float | None:
        """The first column of the first row."""
        found = self.row(query, parameters)
        return None if found is None else found[0]

    def status(self) -> dict[str, Any]:
        """What the trainer said last of itself."""
        found = self.row("SELECT value FROM facts WHERE name = ?", (STATUS,))
        said: Any = json.loads(bytes(found[0])) if found else {}
        return said

    def model(self) -> str:
        """The folder or name of the model."""
        return str(self.setting("engine", "model") or "")

    def calls(self, sequence: int, attempt: int) -> list[Call]:
        """The calls of a claim, oldest first; none if there were none, or they were dropped.

        Raises NotRecordedError for what no server wrote, such as a few bytes that stand for gigabytes.
        """
        return self.calls_of(CALLS_OF_CLAIM.replace("{s}", ""), (sequence, attempt))

    def calls_of(self, query: str, parameters: Sequence[Any]) -> list[Call]:
        """The calls that a query of their bytes finds. Raises NotRecordedError."""
        found = self.rows(query, parameters)
        try:
            return decoded((bytes(data),) for (data,) in found)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise NotRecordedError(f"the ledger holds something else than calls: {error}") from error

    def sequences(self, sequence: int) -> dict[int, list[TrainedSequence]]:
        """Step -> what it did with the sequences of this episode, of every role. Raises NotRecordedError."""
        query = "SELECT step, sequences FROM tokens WHERE episode = ? AND undone = 0 ORDER BY step, role"
        found: dict[int, list[TrainedSequence]] = {}
        try:
            for step, data in self.rows(query, (sequence,)):
                found.setdefault(step, []).extend(unpacked_sequences(bytes(data)) if data else [])
        except ValueError as error:
            raise NotRecordedError(f"the ledger holds something else than tokens: {error}") from error
        return {step: each for step, each in found.items() if each}

    def transcribed(self, sequence: int) -> list[int]:
        """The attempts at this episode whose transcripts are there."""
        query = (
            "SELECT attempt FROM transcripts WHERE episode = ? AND length(transcript) > 0 ORDER BY attempt"
        )
        return [attempt for (attempt,) in self.rows(query, (sequence,))]

    def transcript(self, sequence: int, attempt: int) -> bytes:
        """The transcript of one of them, as its program sent it: it may be anything."""
        query = "SELECT transcript FROM transcripts WHERE episode = ? AND attempt = ?"
        found = self.row(query, (sequence, attempt))
        return b"" if found is None else found[0]

    def close(self) -> None:
        """Close this thread's connection."""
        self._of_thread.reading.close()
        del self._of_thread.reading


def _read_config(path: Path) -> dict[str, Any]:
    """The config in a file that may be from elsewhere."""
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
    """Whether this is the folder of a run."""
    return (folder / RUN_ID).is_file()


def find_runs(root: Path) -> dict[str, Path]:
    """Name -> folder of the runs in `root`, or of the one that it is.

    Raises ConfigError if there are none.
    """
    if is_run(root):
        root = root.resolve()
        return {root.name: root}
    found = [path.parent for path in sorted(root.glob(f"*/{RUN_ID}")) if not path.parent.is_symlink()]
    if not found:
        raise ConfigError(f"{root} is not the folder of a run, and has none in it (no {RUN_ID})")
    return {path.name: path for path in found}
