"""`Runs`: the runs that a page shows, opened as they are asked for."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.record.reader import Record, find_runs

LOOK_AGAIN_S = 2.0
"""Between two looks at the folder for new runs."""


class Runs:
    """The run in a folder, or all that are in it. For any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._records: dict[str, Record] = {}
        self._folders: dict[str, Path] = {}
        self._looked = -LOOK_AGAIN_S
        self._lock = threading.Lock()

    def folders(self) -> dict[str, Path]:
        """Name -> folder, of the runs that are there now."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= LOOK_AGAIN_S:
                self._looked = now
                try:
                    self._folders = find_runs(self.root)
                except ConfigError:
                    self._folders = {}
            return self._folders

    def record(self, name: str) -> Record:
        """Raises NotRecordedError for a run that is not there."""
        folder = self.folders().get(name)
        if folder is None:
            known = ", ".join(list(self._folders)[:10]) or "no runs yet"
            raise NotRecordedError(f"there is no run {name!r} here; there are {known}")
        with self._lock:
            if name not in self._records:
                self._records[name] = Record(folder)
            return self._records[name]

    def readable(self) -> dict[str, Record]:
        """Name -> record, without those that another version wrote."""
        found: dict[str, Record] = {}
        for name in self.folders():
            with suppress(ConfigError):
                found[name] = self.record(name)
        return found

    def record_of(self, episode_uuid: str) -> tuple[str, Record]:
        """The run that has the episode, and its record. Raises NotRecordedError."""
        for name, record in self.readable().items():
            if record.number("SELECT number FROM episodes WHERE uuid = ?", (episode_uuid,)) is not None:
                return name, record
        raise NotRecordedError(f"no run here has an episode {episode_uuid!r} that ended")
