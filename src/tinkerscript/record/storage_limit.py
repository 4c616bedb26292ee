"""`StorageLimit`: how much room a record's calls, tokens and transcripts may take.

Invariant: beyond it those of the oldest episodes go first; rows stay.
"""

from __future__ import annotations

import sqlite3

_OLDEST = """
SELECT min(number) FROM (
    SELECT min(episode) AS number FROM details
    UNION ALL SELECT min(episode) FROM transcripts
    UNION ALL SELECT min(episode) FROM trained WHERE sequences IS NOT NULL
)
"""
"""The number of the oldest episode of which there are calls, tokens or transcripts."""


class StorageLimit:
    """Keeps count of one file, for whoever writes it."""

    def __init__(self, limit_mb: int) -> None:
        """0: no limit."""
        self._limit = limit_mb * 2**20
        self.stored = 0
        """Bytes of calls, tokens and transcripts in the file."""

    def count(self, run: sqlite3.Connection) -> None:
        """Read what is stored. Reads all of it."""
        (details,) = run.execute("SELECT coalesce(sum(length(detail)), 0) FROM details").fetchone()
        query = "SELECT coalesce(sum(length(sequences)), 0) FROM trained WHERE sequences IS NOT NULL"
        (sequences,) = run.execute(query).fetchone()
        query = "SELECT coalesce(sum(length(transcript)), 0) FROM transcripts"
        (transcripts,) = run.execute(query).fetchone()
        self.stored = details + sequences + transcripts

    def add(self, size: int) -> None:
        """Bytes that were written; below 0: deleted."""
        self.stored += size

    def keep(self, run: sqlite3.Connection) -> None:
        """Drop what is stored of the oldest episodes until the rest is within the limit."""
        while self._limit and self.stored > self._limit:
            (oldest,) = run.execute(_OLDEST).fetchone()
            if oldest is None:
                return
            for query in (
                "DELETE FROM details WHERE episode = ? RETURNING length(detail)",
                "DELETE FROM transcripts WHERE episode = ? RETURNING length(transcript)",
                "SELECT length(sequences) FROM trained WHERE episode = ? AND sequences IS NOT NULL",
            ):
                self.stored -= sum(length for (length,) in run.execute(query, (oldest,)).fetchall())
            run.execute("UPDATE trained SET sequences = NULL WHERE episode = ?", (oldest,))
