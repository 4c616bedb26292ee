"""The tables of a run's record (`record.sqlite`), and opening it.

Invariant: rows are only added, except that a resumed run takes back what the steps that it repeats left in
`TAKEN_BACK`, and says so in `resumes`.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from tinkerscript.errors import ConfigError
from tinkerscript.files import stamp

RECORD_FILE = "record.sqlite"
"""In the run's folder."""

RECORD_VERSION = 3

TAKEN_BACK = ("metrics", "steps", "trained", "evaluations", "findings")
"""The tables whose rows of later steps are deleted when a run resumes."""

BUSY_S = 5.0
"""How long SQLite itself waits for a writer's lock."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE run (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE names (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE metrics (
    name INTEGER NOT NULL,
    step INTEGER NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (name, step)
) WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    policy_version INTEGER NOT NULL,
    reward REAL,
    accepted INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    trained INTEGER NOT NULL,
    max_lag INTEGER
);
CREATE TABLE evaluations (
    label TEXT PRIMARY KEY,
    step INTEGER NOT NULL,
    time REAL NOT NULL,
    policy_version INTEGER NOT NULL,
    score REAL,
    accepted INTEGER NOT NULL,
    failed INTEGER NOT NULL
);
CREATE TABLE samples (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    task TEXT NOT NULL,
    id TEXT NOT NULL,
    sample BLOB NOT NULL
);
CREATE TABLE episodes (
    number INTEGER PRIMARY KEY,
    uuid TEXT NOT NULL UNIQUE,
    type TEXT NOT NULL,
    step INTEGER NOT NULL,
    label TEXT NOT NULL,
    group_id TEXT NOT NULL,
    sample INTEGER,
    status TEXT NOT NULL,
    reward REAL,
    is_success INTEGER,
    attempt INTEGER NOT NULL,
    client TEXT NOT NULL,
    started INTEGER NOT NULL,
    ended REAL NOT NULL,
    calls INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    first_version INTEGER,
    last_version INTEGER,
    preview TEXT NOT NULL,
    figures TEXT NOT NULL
);
CREATE INDEX episodes_of_step ON episodes (step, label, group_id);
CREATE INDEX episodes_of_sample ON episodes (sample, number);
CREATE INDEX episodes_that_failed ON episodes (number) WHERE status != 'accepted';
CREATE TABLE details (episode INTEGER PRIMARY KEY, detail BLOB NOT NULL);
CREATE TABLE transcripts (
    episode INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    transcript BLOB NOT NULL,
    UNIQUE (episode, attempt)
);
CREATE TABLE trained (
    episode INTEGER NOT NULL,
    step INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    advantage REAL,
    sequences BLOB,
    PRIMARY KEY (episode, step)
) WITHOUT ROWID;
CREATE INDEX trained_in_step ON trained (step);
CREATE INDEX trained_with_tokens ON trained (episode) WHERE sequences IS NOT NULL;
CREATE TABLE findings (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    detail TEXT NOT NULL,
    episode TEXT NOT NULL,
    count INTEGER NOT NULL
);
CREATE INDEX findings_of_step ON findings (step);
CREATE TABLE resumes (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    time REAL NOT NULL
);
CREATE TABLE undone (episode INTEGER PRIMARY KEY, resume INTEGER NOT NULL);
CREATE TABLE notes (number INTEGER PRIMARY KEY, time REAL NOT NULL, text TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(body, content='');
PRAGMA user_version = {RECORD_VERSION};
COMMIT;
"""


def take_back(run: sqlite3.Connection, step: int) -> None:
    """Delete what the steps after `step` left."""
    for table in TAKEN_BACK:
        run.execute(f"DELETE FROM {table} WHERE step > ?", (step,))


def open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection for any one thread at a time; makes the file. Raises sqlite3.Error, and ConfigError for a
    file of another version."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    try:
        stamp(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(_SCHEMA)
        else:
            _check(path, version)
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Raises ConfigError if there is no record, or one of another version or
    that SQLite cannot read."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no record ({path.name}): is it the folder of a run?")
    # SQLite keeps an index beside the file, unless nobody writes there.
    mode = "mode=ro" if os.access(path.parent, os.W_OK) else "immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        _check(path, version)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise ConfigError(f"{path} cannot be read: {error}") from error
        raise
    return connection


def _check(path: Path, version: int) -> None:
    if version != RECORD_VERSION:
        raise ConfigError(
            f"{path} has schema version {version}, and this tinkerscript reads {RECORD_VERSION}: use the "
            "version that wrote it"
        )
