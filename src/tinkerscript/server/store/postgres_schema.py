"""A run's tables in PostgreSQL, in a schema of its own; what the store reads from them and writes into them.

`{schema}` in a statement stands for the schema's name. Text is stored as it is, except for U+0000, which
PostgreSQL cannot store (`escaped`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from pydantic import TypeAdapter

from tinkerscript.errors import ConfigError
from tinkerscript.protocol import Failure
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.database_lease import LEASE_TABLE
from tinkerscript.server.store.episode_store import WriteBatch

PAGE = 5000
"""Episodes to read at once. Between two pages the lease can be renewed."""

POSTGRES_VERSION = "1"

MAX_NAME_BYTES = 63

TABLES = f"""
{LEASE_TABLE}
CREATE TABLE {{schema}}.shared_values (name text PRIMARY KEY, value bytea NOT NULL);
INSERT INTO {{schema}}.shared_values VALUES ('schema_version', '{POSTGRES_VERSION}');
CREATE TABLE {{schema}}.episodes (
    sequence bigint PRIMARY KEY,
    uuid text NOT NULL UNIQUE,
    episode_type text NOT NULL,
    group_id text NOT NULL,
    digest bytea NOT NULL,
    pool text NOT NULL,
    group_size integer NOT NULL,
    state text NOT NULL,
    claimants json NOT NULL,
    request_ids json NOT NULL,
    forgiven integer NOT NULL,
    lease_s double precision NOT NULL,
    claimed_at double precision NOT NULL,
    policy_version bigint NOT NULL,
    reward double precision,
    result_digest bytea NOT NULL,
    failures json NOT NULL,
    offered boolean NOT NULL,
    acknowledged boolean NOT NULL,
    dropped boolean NOT NULL
) WITH (fillfactor = 70);
CREATE TABLE {{schema}}.payloads (sequence bigint PRIMARY KEY, payload bytea NOT NULL);
CREATE TABLE {{schema}}.results (sequence bigint PRIMARY KEY, result bytea NOT NULL);
CREATE TABLE {{schema}}.calls (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sequence bigint NOT NULL,
    attempt integer NOT NULL,
    call bytea NOT NULL
);
CREATE INDEX calls_of_claim ON {{schema}}.calls (sequence, attempt);
CREATE TABLE {{schema}}.transcripts (
    sequence bigint NOT NULL,
    attempt integer NOT NULL,
    transcript bytea NOT NULL,
    PRIMARY KEY (sequence, attempt)
);
"""

_IDENTITY = ("sequence", "uuid", "episode_type", "group_id", "digest", "pool", "group_size")

_PROGRESS = (
    *("state", "claimants", "request_ids", "forgiven", "lease_s", "claimed_at", "policy_version"),
    *("reward", "result_digest", "failures", "offered", "acknowledged", "dropped"),
)

_COLUMNS = _IDENTITY + _PROGRESS

_JSON = ("claimants", "request_ids", "failures")

LOAD = f"""
SELECT {", ".join(f"{name}::text" if name in _JSON else name for name in _COLUMNS)}, payload, result
    FROM {{schema}}.episodes
    LEFT JOIN {{schema}}.payloads USING (sequence) LEFT JOIN {{schema}}.results USING (sequence)
    WHERE sequence > %s ORDER BY sequence LIMIT {PAGE}
"""

READ_CALLS = """
SELECT sequence, attempt, call
    FROM {schema}.calls
    JOIN unnest(%s::bigint[], %s::integer[]) AS wanted (sequence, attempt) USING (sequence, attempt)
    ORDER BY number
"""

# Statements that write have one parameter: a JSON array of rows.

_INSERT = """
INSERT INTO {schema}.episodes SELECT * FROM json_populate_recordset(NULL::{schema}.episodes, %s)"""

_UPDATE = f"""
UPDATE {{schema}}.episodes AS e SET {", ".join(f"{name} = new.{name}" for name in _PROGRESS)}
    FROM json_populate_recordset(NULL::{{schema}}.episodes, %s) AS new WHERE e.sequence = new.sequence"""

_PAYLOADS = """
INSERT INTO {schema}.payloads SELECT sequence, decode(data, 'base64')
    FROM json_to_recordset(%s) AS new (sequence bigint, data text)"""

_RESULTS = """
INSERT INTO {schema}.results SELECT sequence, decode(data, 'base64')
    FROM json_to_recordset(%s) AS new (sequence bigint, data text)
    ON CONFLICT (sequence) DO UPDATE SET result = excluded.result"""

_CALLS = """
INSERT INTO {schema}.calls (sequence, attempt, call) SELECT sequence, attempt, decode(data, 'base64')
    FROM json_to_recordset(%s) AS new (sequence bigint, attempt integer, place bigint, data text)
    ORDER BY place"""

_TRANSCRIPTS = """
INSERT INTO {schema}.transcripts SELECT sequence, attempt, decode(data, 'base64')
    FROM json_to_recordset(%s) AS new (sequence bigint, attempt integer, data text)
    ON CONFLICT (sequence, attempt) DO UPDATE SET transcript = excluded.transcript"""

_DROP_CALLS = """
DELETE FROM {schema}.calls AS t USING json_to_recordset(%s) AS old (sequence bigint, attempt integer)
    WHERE t.sequence = old.sequence AND t.attempt = old.attempt"""

_FORGET = """
WITH old AS (SELECT * FROM json_to_recordset(%s) AS old (sequence bigint)),
    p AS (DELETE FROM {schema}.payloads AS t USING old WHERE t.sequence = old.sequence),
    r AS (DELETE FROM {schema}.results AS t USING old WHERE t.sequence = old.sequence),
    s AS (DELETE FROM {schema}.transcripts AS t USING old WHERE t.sequence = old.sequence)
DELETE FROM {schema}.calls AS t USING old WHERE t.sequence = old.sequence"""

_encode = msgspec.json.Encoder().encode
_encode_call = msgspec.msgpack.Encoder().encode
_decode_names = msgspec.json.Decoder(list[str]).decode
_failures = TypeAdapter(list[Failure])


class Statement(NamedTuple):
    """One statement of a transaction; its only parameter is a JSON array of rows."""

    sql: str
    rows: list[bytes]
    """Each in JSON."""


def statements(batch: WriteBatch) -> Iterator[Statement]:
    """The statements of a transaction that have rows, in their order."""
    new = batch.added.values()
    changed = [each for uuid, each in batch.saved.items() if uuid not in batch.added]
    place = count()
    # PostgreSQL replaces no row twice in a statement: the last transcript of each claim.
    transcripts = {(each.sequence, attempt): data for each, attempt, data in batch.transcripts}
    statements = [
        Statement(_INSERT, [_encode(_identity(each) | _progress(each)) for each in new]),
        Statement(_PAYLOADS, [_blob(each.payload, sequence=each.sequence) for each in new]),
        Statement(_UPDATE, [_encode(_progress(each) | {"sequence": each.sequence}) for each in changed]),
        Statement(
            _RESULTS,
            [
                _blob(each.result, sequence=each.sequence)
                for each in (*new, *changed)
                if each.state == "ended"
            ],
        ),
        Statement(
            _CALLS,
            [
                _blob(_encode_call(call), sequence=each.sequence, attempt=attempt, place=next(place))
                for each, attempt, call in batch.calls
            ],
        ),
        Statement(
            _TRANSCRIPTS,
            [
                _blob(data, sequence=sequence, attempt=attempt)
                for (sequence, attempt), data in transcripts.items()
            ],
        ),
        Statement(
            _DROP_CALLS,
            [_encode({"sequence": each.sequence, "attempt": attempt}) for each, attempt in batch.dropped],
        ),
        Statement(
            _FORGET,
            [_encode({"sequence": each.sequence}) for each in (*new, *changed) if each.acknowledged],
        ),
    ]
    return (statement for statement in statements if statement.rows)


def _blob(data: bytes, **key: int) -> bytes:
    return _encode(key | {"data": base64.b64encode(data).decode()})


def _identity(episode: EpisodeRecord) -> dict[str, Any]:
    return {
        "sequence": episode.sequence,
        "uuid": escaped(episode.uuid),
        "episode_type": episode.episode_type,
        "group_id": escaped(episode.group_id),
        "digest": _hex(episode.digest),
        "pool": escaped(episode.pool),
        "group_size": episode.group_size,
    }


def _progress(episode: EpisodeRecord) -> dict[str, Any]:
    return {
        "state": episode.state,
        "claimants": [escaped(name) for name in episode.claimants],
        "request_ids": [escaped(name) for name in episode.request_ids],
        "forgiven": episode.forgiven,
        "lease_s": episode.lease_s,
        "claimed_at": episode.claimed_at,
        "policy_version": episode.policy_version,
        "reward": episode.reward,
        "result_digest": _hex(episode.result_digest),
        "failures": [_with_texts(each, escaped) for each in episode.failures],
        "offered": episode.offered,
        "acknowledged": episode.acknowledged,
        "dropped": episode.dropped,
    }


def _hex(data: bytes) -> str:
    return "\\x" + data.hex()


def _with_texts(failure: Failure, change: Callable[[str], str]) -> dict[str, Any]:
    """A failure as JSON, with each text changed."""
    fields = failure.model_dump(mode="json")
    return {name: change(value) if isinstance(value, str) else value for name, value in fields.items()}


def episode_of(row: tuple[Any, ...]) -> EpisodeRecord:
    fields = dict(zip((*_COLUMNS, "payload", "result"), row, strict=True))
    for name in ("uuid", "group_id", "pool"):
        fields[name] = unescaped(fields[name])
    for name in ("claimants", "request_ids"):
        fields[name] = _names_in(fields[name])
    for name in ("payload", "result"):
        fields[name] = fields[name] or b""
    fields["failures"] = _failures_in(fields["failures"])
    return EpisodeRecord(**fields)


def _names_in(text: str) -> list[str]:
    names = _decode_names(text) if text != "[]" else []
    return [unescaped(name) for name in names] if "\\u0001" in text else names


def _failures_in(text: str) -> list[Failure]:
    failures = _failures.validate_json(text) if text != "[]" else []
    return [Failure(**_with_texts(each, unescaped)) for each in failures] if "\\u0001" in text else failures


_ESCAPES = str.maketrans({"\0": "\x010", "\x01": "\x011"})


def escaped(text: str) -> str:
    """`text` without U+0000, which PostgreSQL cannot store."""
    return text.translate(_ESCAPES) if "\0" in text or "\x01" in text else text


def unescaped(text: str) -> str:
    """The text that was `escaped`."""
    return text.replace("\x010", "\0").replace("\x011", "\x01") if "\x01" in text else text


def split_url(url: str, folder: Path) -> tuple[str, str]:
    """The connection URL without our own parameter, and the run's schema in that database.

    `?schema=NAME` names the schema; without it the name of the run's folder does. Raises ConfigError.
    """
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    named = [value for name, value in query if name == "schema"]
    rest = urlencode([(name, value) for name, value in query if name != "schema"], quote_via=quote)
    if not named:
        return parts._replace(query=rest).geturl(), _schema_of(folder)
    if len(named) > 1 or not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", named[0]):
        raise ConfigError(
            f"interchange_server.store: schema={named[-1]} is not the name of a schema: use one of at most "
            f"{MAX_NAME_BYTES} lowercase letters, digits and underscores that does not begin with pg_"
        )
    return parts._replace(query=rest).geturl(), named[0]


def _schema_of(folder: Path) -> str:
    """`tinkerscript_` and the folder's name, with a digest if the name had to change."""
    name = folder.absolute().name
    plain = re.sub(r"[^a-z0-9_]", "_", name.lower())[:40]
    if plain != name:
        plain += "_" + hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"tinkerscript_{plain}"
