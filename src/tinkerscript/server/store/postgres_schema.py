"""The tables of a run in PostgreSQL, in a schema of its own, and how they change from version to version.

Invariants: the foundation (the lease, the shared values, the version) never changes, so servers of all
versions know who leads; migrations run in the transaction that takes the lease, so no older server writes
meanwhile or afterwards. Text is stored as it is, except for U+0000, which PostgreSQL cannot store: see
`escaped`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from tinkerscript.errors import ConfigError

LOST_LEASE = "TS001"
"""SQLSTATE of a transaction whose epoch is over."""

MAX_NAME_BYTES = 63

FOUNDATION = f"""
CREATE TABLE {{schema}}.migrations (
    version integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE {{schema}}.shared_values (name text PRIMARY KEY, value bytea NOT NULL);
-- One row, whose key is the epoch: a transaction that locks it FOR KEY SHARE keeps the next leader waiting,
-- who changes the key, but not the renewals, which do not.
CREATE TABLE {{schema}}.lease (
    epoch bigint PRIMARY KEY,
    holder text NOT NULL,
    expires_at timestamptz NOT NULL
);
INSERT INTO {{schema}}.lease VALUES (0, '', '-infinity');
-- First in each transaction that writes: nobody else leads before it ends.
CREATE FUNCTION {{schema}}.fence(expected bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('lock_timeout', '2s', true),
        set_config('idle_in_transaction_session_timeout', '2s', true);
    PERFORM FROM {{schema}}.lease WHERE epoch = expected FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'another server serves: epoch % is over', expected USING ERRCODE = '{LOST_LEASE}';
    END IF;
END $$;
"""

_EPISODES = """
CREATE TABLE {schema}.episodes (
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
CREATE TABLE {schema}.payloads (sequence bigint PRIMARY KEY, payload bytea NOT NULL);
CREATE TABLE {schema}.results (sequence bigint PRIMARY KEY, result bytea NOT NULL);
CREATE TABLE {schema}.calls (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sequence bigint NOT NULL,
    attempt integer NOT NULL,
    call bytea NOT NULL
);
CREATE INDEX calls_of_claim ON {schema}.calls (sequence, attempt);
"""

_READABLE = """
-- What has happened to each episode, in order: one row for each change that was committed.
CREATE TABLE {schema}.events (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sequence bigint NOT NULL,
    state text NOT NULL,
    attempt integer NOT NULL,
    client_uuid text NOT NULL,
    policy_version bigint NOT NULL,
    reward double precision,
    failure json,
    acknowledged boolean NOT NULL
);
CREATE INDEX events_of_episode ON {schema}.events (sequence);
-- Every claim that was made, and how it was lost, if it was.
CREATE VIEW {schema}.claims AS
    SELECT e.sequence, e.uuid, claim.number::integer AS attempt, claim.client_uuid, e.state AS episode_state,
        failure.value ->> 'kind' AS failure_kind, failure.value ->> 'message' AS failure_message
    FROM {schema}.episodes e
    CROSS JOIN LATERAL json_array_elements_text(e.claimants) WITH ORDINALITY AS claim (client_uuid, number)
    LEFT JOIN LATERAL json_array_elements(e.failures) AS failure
        ON (failure.value ->> 'attempt')::bigint = claim.number;
"""

_TRANSCRIPTS = """
CREATE TABLE {schema}.transcripts (
    sequence bigint NOT NULL,
    attempt integer NOT NULL,
    transcript bytea NOT NULL,
    PRIMARY KEY (sequence, attempt)
);
"""

MIGRATIONS: tuple[str, ...] = (_EPISODES, _READABLE, _TRANSCRIPTS)
"""The script that leads to version 1, 2, and so on."""

_ESCAPES = str.maketrans({"\0": "\x010", "\x01": "\x011"})


def escaped(text: str) -> str:
    """`text` without U+0000."""
    return text.translate(_ESCAPES) if "\0" in text or "\x01" in text else text


def unescaped(text: str) -> str:
    """What was `escaped`."""
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
