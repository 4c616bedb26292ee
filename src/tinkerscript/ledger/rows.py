"""The tables of a run's ledger, each as the struct of its rows.

A struct's fields are the table's columns, in their order, so one definition makes the table in SQLite and in
PostgreSQL, writes its rows, reads them, and carries those of the trainer over the link.

Invariants: `KEY` and `CONSTRAINTS` hold what code alone would have to hold: an episode ends once, trains once
in a step and role, and a policy version is published once. Rows of steps that a resumption undid stay, and
name it in `undone`; 0 in that column means that the row stands.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Union, get_args, get_origin

import msgspec

LEDGER_VERSION = 3

STANDS = 0
"""In a column `undone`: no resumption undid the row."""


OF_EPISODE = ("FOREIGN KEY (episode) REFERENCES {s}episodes (sequence)",)


class Row(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all rows."""

    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]] = ()
    """The primary key. A row replaces the former one with its key. Without a key rows are numbered in the
    order in which they are written, in a column `number`."""

    ONCE: ClassVar[bool] = False
    """Whether a second row with the same key is an error instead."""

    KEEPS_FIRST: ClassVar[bool] = False
    """Whether the first row with a key stays instead."""

    FIXED: ClassVar[tuple[str, ...]] = ()
    """Columns that are the same in every row with a given key. Later rows do not write them, which saves the
    work of their indexes."""

    CONSTRAINTS: ClassVar[tuple[str, ...]] = ()
    """Further constraints of the table, in SQL that both databases know."""

    INDEXES: ClassVar[tuple[str, ...]] = ()
    """Columns of each index in parentheses, and for which rows it is, in SQL."""

    @property
    def size(self) -> int:
        """Bytes of what may be large, about."""
        return 0


# What the server writes


class SampleRow(Row, frozen=True, kw_only=True):
    """What a client gets to work on, which the episodes of a group share."""

    TABLE = "samples"
    KEY = ("digest",)
    KEEPS_FIRST = True

    digest: bytes
    payload: bytes
    """JSON object."""

    @property
    def size(self) -> int:
        return len(self.payload)


class EpisodeRow(Row, frozen=True, kw_only=True):
    """One episode, as it stands now. `server.episodes.record.EpisodeRecord` says more about the columns."""

    TABLE = "episodes"
    KEY = ("sequence",)
    FIXED = (
        *("uuid", "episode_type", "group_id", "pool", "group_size", "step", "label", "position"),
        *("sample", "digest"),
    )
    CONSTRAINTS = ("UNIQUE (uuid)", "UNIQUE (end_number)")
    INDEXES = (
        "(step, label, end_number)",
        "(group_id)",
        "(sample, end_number)",
        "(position) WHERE position >= 0",
        "(end_number) WHERE state = 'failed'",
        "(end_number) WHERE consumed = 1 AND emptied = 0",
    )

    sequence: int
    """In the order of registration."""

    uuid: str
    episode_type: str
    """`train` or `eval`."""

    group_id: str
    pool: str
    group_size: int
    step: int
    """The first training step that could train on it, or the one that its evaluation follows; 0: a client's
    own sample."""

    label: str = ""
    """Of its evaluation, such as `before`; empty for training."""

    position: int = -1
    """Of its sample in the order of training; -1 if it has none."""

    sample: bytes
    """`SampleRow.digest`."""

    digest: bytes
    """Of the registration."""

    state: str
    """`registered`, `claimed`, `ended` or `failed`."""

    failure: str = ""
    """The kind of its last failure if it failed; empty if it did not."""

    forgiven: int = 0
    reward: float | None = None
    is_success: int | None = None
    result_digest: bytes = b""
    end_number: int | None = None
    """In the order in which episodes ended or failed; NULL before."""

    ended_at: float | None = None
    """Unix time in seconds."""

    offered: int = 0
    """1: its failure was sent to a trainer."""

    consumed: int = 0
    """1: a step or an evaluation used it or left it out, or a resumption gave it up."""

    dropped: int = 0
    """1: an operator took it off the list of failures."""

    emptied: int = 0
    """1: its calls and transcripts were dropped, to save room."""

    undone: int = STANDS
    """The resumption that undid the step or the evaluation that it was planned for."""


class AttemptRow(Row, frozen=True, kw_only=True):
    """One claim of an episode; attempt 0: what ended the episode while nobody held it."""

    TABLE = "attempts"
    KEY = ("episode", "attempt")
    CONSTRAINTS = OF_EPISODE

    episode: int
    attempt: int
    client: str
    request_id: str
    claimed_at: float
    """Unix time in seconds."""

    queued_s: float | None = None
    """Seconds that the episode waited for this claim; NULL: unknown."""

    policy_version: int
    """The newest when it was claimed."""

    lease_s: float
    failure: str | None = None
    """`protocol.Failure` as JSON; NULL while it has not failed."""


class CallRow(Row, frozen=True, kw_only=True):
    """One model call, and what queries ask of it."""

    TABLE = "calls"
    CONSTRAINTS = OF_EPISODE
    INDEXES = ("(episode, attempt)",)

    episode: int
    attempt: int
    role: str
    """The role of the run that was called; empty: the policy."""

    created: int
    """Unix time in seconds; 0: unknown."""

    policy_version: int
    """Of the first sampled token."""

    last_version: int
    """Of the last one."""

    prompt_tokens: int
    """New ones."""

    sampled_tokens: int
    stop_reason: str
    call: bytes
    """`rollouts.call.Call` as msgpack, `packed`; empty in an episode that is `emptied`."""

    @property
    def size(self) -> int:
        return len(self.call)


class ResultRow(Row, frozen=True, kw_only=True):
    """What an episode ended with."""

    TABLE = "results"
    KEY = ("episode",)
    CONSTRAINTS = OF_EPISODE

    episode: int
    result: bytes
    """`protocol.WorkflowOutput` as JSON."""

    @property
    def size(self) -> int:
        return len(self.result)


class TranscriptRow(Row, frozen=True, kw_only=True):
    """What the program of an attempt left for people to read."""

    TABLE = "transcripts"
    KEY = ("episode", "attempt")
    CONSTRAINTS = OF_EPISODE

    episode: int
    attempt: int
    transcript: bytes

    @property
    def size(self) -> int:
        return len(self.transcript)


class FactRow(Row, frozen=True, kw_only=True):
    """A fact about the ledger or the run, by name."""

    TABLE = "facts"
    KEY = ("name",)

    name: str
    value: bytes


# What the trainer writes


class ResumptionRow(Row, frozen=True, kw_only=True):
    """A trainer began: with a new run, or after the step of a checkpoint."""

    TABLE = "resumptions"
    KEY = ("resumption",)
    ONCE = True

    resumption: int
    """From 1."""

    step: int
    time: float


class PublicationRow(Row, frozen=True, kw_only=True):
    """Weights became a policy version."""

    TABLE = "publications"
    KEY = ("policy_version",)
    ONCE = True

    policy_version: int
    step: int
    """Training steps behind the weights."""

    time: float
    undone: int = STANDS


class StepRow(Row, frozen=True, kw_only=True):
    """A training step, or the one at which the run stopped."""

    TABLE = "steps"
    KEY = ("step", "undone")
    ONCE = True

    step: int
    time: float
    policy_version: int
    """What it published."""

    reward: float | None = None
    """Mean of its accepted episodes."""

    accepted: int = 0
    failed: int = 0
    trained: int = 0
    """Episodes that carried a gradient of the run's own policy."""

    max_lag: int | None = None
    """Of its episodes, in steps."""

    stopped: str = ""
    """Why it changed no weights and ended the run; empty for any other."""

    undone: int = STANDS


class TrainedRow(Row, frozen=True, kw_only=True):
    """What became of an episode that ended: a step trained on it, or it was left out."""

    TABLE = "trained"
    KEY = ("episode", "step", "role", "undone")
    CONSTRAINTS = OF_EPISODE
    INDEXES = ("(step)",)
    ONCE = True

    episode: int
    """`EpisodeRow.sequence`."""

    step: int
    role: str = ""
    """The policy that trained on it: the run's own, or a role's by name."""

    outcome: str
    """One of `Use`."""

    place: int = -1
    """Of its group among those whose gradients the step used, from 0; -1: of none of them."""

    advantage: float | None = None
    reason: str = ""
    undone: int = STANDS


class VerdictRow(Row, frozen=True, kw_only=True):
    """What the judge of its group said about an episode. It stands also if its step is undone."""

    TABLE = "verdicts"
    KEY = ("episode",)
    CONSTRAINTS = OF_EPISODE

    episode: int
    """`EpisodeRow.sequence`."""

    reward: float | None
    """What it trains on in place of its own reward; NULL: the judge failed, and the group did not train."""

    words: str = ""
    """The judge's, or why it failed."""

    time: float


class TokensRow(Row, frozen=True, kw_only=True):
    """What a step computed for each sampled token of an episode."""

    TABLE = "tokens"
    KEY = ("episode", "step", "role", "undone")
    CONSTRAINTS = OF_EPISODE

    episode: int
    step: int
    role: str = ""
    sequences: bytes
    """`ledger.tokens.TrainedSequence`s as msgpack, `packed`."""

    undone: int = STANDS

    @property
    def size(self) -> int:
        return len(self.sequences)


class CheckpointRow(Row, frozen=True, kw_only=True):
    """The weights and the state of the optimizer after a step are on disk."""

    TABLE = "checkpoints"
    KEY = ("step", "undone")

    step: int
    time: float
    policy_version: int
    train_seconds: float
    report: bytes = b"{}"
    """The alignment report at this step as JSON."""

    role_reports: bytes = b"{}"
    """Those of the roles that train, by name."""

    curriculum: bytes = b"{}"
    """JSON: the pass rate of each sample that has trained; empty without a curriculum."""

    undone: int = STANDS


class EvaluationRow(Row, frozen=True, kw_only=True):
    """The score of a policy version on samples for evaluation."""

    TABLE = "evaluations"
    KEY = ("label", "step", "undone")
    ONCE = True

    label: str
    step: int
    time: float
    policy_version: int
    score: float | None
    """Mean reward of the accepted episodes; NULL if there are none."""

    margin: float | None = None
    """To each side of the score: a 95% interval, from the spread of the rewards; NULL for fewer than two."""

    accepted: int
    failed: int
    """Episodes without a score; not part of the mean."""

    role_scores: bytes = b"{}"
    """JSON: role that trains -> mean reward of the accepted episodes that called it."""

    undone: int = STANDS


class MetricRow(Row, frozen=True, kw_only=True):
    """A number about a step."""

    TABLE = "metrics"
    KEY = ("name", "step", "undone")

    name: str
    step: int
    value: float
    undone: int = STANDS


class FindingRow(Row, frozen=True, kw_only=True):
    """What the alignment check found in a step."""

    TABLE = "findings"
    INDEXES = ("(step)", "(step) WHERE kind = 'finding'")

    step: int
    kind: str
    """`finding`: about a step; `error`: about a sequence that did not train; `warning`."""

    name: str
    detail: str = ""
    episode: str = ""
    """Its uuid; empty: none in particular."""

    count: int = 1
    undone: int = STANDS


class NoteRow(Row, frozen=True, kw_only=True):
    """What the run told people."""

    TABLE = "notes"

    time: float
    text: str


class Use:
    """Values of `TrainedRow.outcome`."""

    TRAINED = "trained"
    SAME_REWARD = "same_reward"
    """As all of its group, which therefore has no gradient."""

    MISALIGNED = "misaligned"
    NOTHING_TO_TRAIN = "nothing_to_train"
    """Every token was constrained by a grammar, or the token limit cut the last reply off
    (`training.mask_truncated`)."""

    GROUP_TOO_SMALL = "group_too_small"
    EVALUATED = "evaluated"
    LEFT_OUT = "left_out"
    """Not needed: failed, cancelled, or no batch waited for it."""

    STALE = "stale"
    """Too old to train."""

    SET_ASIDE = "set_aside"
    """The run stopped before its step because of it. It never trains, also after a resumption."""

    GIVEN_UP = "given_up"
    """A resumption had no use for it. `step`: the one after which the run went on."""


TrainerRow = (
    PublicationRow
    | StepRow
    | TrainedRow
    | VerdictRow
    | TokensRow
    | CheckpointRow
    | EvaluationRow
    | MetricRow
    | FindingRow
    | NoteRow
    | FactRow
)
"""What a trainer commits."""

TABLES: tuple[type[Row], ...] = (
    FactRow,
    SampleRow,
    EpisodeRow,
    AttemptRow,
    CallRow,
    ResultRow,
    TranscriptRow,
    ResumptionRow,
    PublicationRow,
    StepRow,
    TrainedRow,
    VerdictRow,
    TokensRow,
    CheckpointRow,
    EvaluationRow,
    MetricRow,
    FindingRow,
    NoteRow,
)
"""In the order in which they are created, and written within a transaction."""

UNDONE: tuple[type[Row], ...] = (
    PublicationRow,
    StepRow,
    TrainedRow,
    TokensRow,
    CheckpointRow,
    EvaluationRow,
    MetricRow,
    FindingRow,
)
"""Those of whose rows a resumption undoes the ones of later steps."""

_SQLITE = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}
_POSTGRES = {int: "bigint", float: "double precision", str: 'text COLLATE "C"', bytes: "bytea"}


@cache
def columns(kind: type[Row]) -> tuple[str, ...]:
    """The names of a table's columns but for the number of one without a key."""
    return tuple(field.name for field in msgspec.structs.fields(kind))


@cache
def key_of(kind: type[Row]) -> Callable[[Row], Any]:
    """What tells a row's key from those of other rows of its table."""
    return attrgetter(*kind.KEY)


@cache
def column_types(kind: type[Row]) -> dict[str, tuple[type, bool]]:
    """Column -> its Python type, and whether it may be NULL."""
    return {field.name: _type_of(field.type) for field in msgspec.structs.fields(kind)}


def _type_of(annotation: Any) -> tuple[type, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        (kind,) = [each for each in get_args(annotation) if each is not type(None)]
        return kind, True
    return annotation, False


def create_statements(*, postgres: bool = False) -> list[str]:
    """The statements that create all tables. `{s}` is the schema's name with a dot, or nothing."""
    types_of = _POSTGRES if postgres else _SQLITE
    number = "number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
    if not postgres:
        number = "number INTEGER PRIMARY KEY"
    found: list[str] = []
    for kind in TABLES:
        # The key's columns first: SQLite 3.40 checks the integrity of no other table without row ids.
        in_order = {name: column_types(kind)[name] for name in (*kind.KEY, *columns(kind))}
        lines = [
            f"{name} {types_of[of]}{'' if nullable else ' NOT NULL'}"
            for name, (of, nullable) in in_order.items()
        ]
        lines = [*lines, f"PRIMARY KEY ({', '.join(kind.KEY)})"] if kind.KEY else [number, *lines]
        # SQLite would keep the key of such a row twice.
        is_key = len(kind.KEY) > 1 and bytes not in [of for of, _ in column_types(kind).values()]
        ends = " WITHOUT ROWID" if is_key and not postgres else ""
        body = ", ".join([*lines, *kind.CONSTRAINTS])
        found.append(f"CREATE TABLE {{s}}{kind.TABLE} ({body}){ends}")
        for place, index in enumerate(kind.INDEXES):
            found.append(f"CREATE INDEX {kind.TABLE}_{place} ON {{s}}{kind.TABLE} {index}")
    return found


@cache
def on_conflict(kind: type[Row]) -> str:
    """The end of an INSERT: what a row does to the former one with its key."""
    if not kind.KEY or kind.ONCE:
        return ""
    key = f" ON CONFLICT ({', '.join(kind.KEY)})"
    others = [name for name in columns(kind) if name not in (*kind.KEY, *kind.FIXED)]
    if kind.KEEPS_FIRST or not others:
        return f"{key} DO NOTHING"
    return f"{key} DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in others)}"
