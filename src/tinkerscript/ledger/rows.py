"""The tables of a run's ledger: one struct for each, whose instances are its rows, also on the link.

`KEY` and `CONSTRAINTS` ensure that an episode ends once and trains once per step and role, and that a policy
version is published once. Rows of undone steps stay, with the resumption in `undone`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Union, get_args, get_origin

import msgspec

LEDGER_VERSION = 4

STANDS = 0  # `undone` of a row that still counts.
OF_EPISODE = ("FOREIGN KEY (episode) REFERENCES {s}episodes (sequence)",)


class Row(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]] = ()
    """Primary key. Tables without a key have a column `number`, in the order of writing."""

    ONCE: ClassVar[bool] = False
    """Whether a second row with a key is an error instead."""

    KEEPS_FIRST: ClassVar[bool] = False
    """Whether the first row with a key stays instead."""

    FIXED: ClassVar[tuple[str, ...]] = ()
    """Columns that later rows with the key do not write, which saves updating indexes."""

    PACKED: ClassVar[str] = ""
    CONSTRAINTS: ClassVar[tuple[str, ...]] = ()
    INDEXES: ClassVar[tuple[str, ...]] = ()
    """Columns in parentheses, and optionally a WHERE clause."""

    @property
    def size(self) -> int:
        return len(getattr(self, self.PACKED)) if self.PACKED else 0


class SampleRow(Row, frozen=True, kw_only=True):
    TABLE = "samples"
    KEY = ("digest",)
    KEEPS_FIRST = True

    digest: bytes
    payload: bytes

    @property
    def size(self) -> int:
        return len(self.payload)


class EpisodeRow(Row, frozen=True, kw_only=True):
    """`server.episodes.record.EpisodeRecord` explains the other columns."""

    TABLE = "episodes"
    KEY = ("sequence",)
    FIXED = (
        *("uuid", "episode_type", "group_id", "pool", "group_size", "step", "label", "position"),
        *("sample", "digest", "consumed"),
    )
    CONSTRAINTS = ("UNIQUE (uuid)", "UNIQUE (end_number)")
    INDEXES = (
        "(step, label, end_number)",
        "(group_id)",
        "(sample)",
        "(position) WHERE position >= 0",
        "(end_number) WHERE state = 'failed'",
        "(end_number) WHERE consumed = 1 AND emptied = 0",
    )

    sequence: int
    uuid: str
    episode_type: str
    group_id: str
    pool: str
    group_size: int
    step: int
    """First step that could train on it, or the step before its evaluation. 0: a client's sample."""

    label: str = ""
    """Label of its evaluation, such as `before`."""

    position: int = -1
    """Its sample's place in the order of training, or -1."""

    sample: bytes
    digest: bytes
    state: str
    failure: str = ""
    forgiven: int = 0
    reward: float | None = None
    is_success: int | None = None
    result_digest: bytes = b""
    end_number: int | None = None

    ended_at: float | None = None
    """Unix time in seconds."""

    offered: int = 0
    """1: a trainer knows that it failed."""

    consumed: int = 0
    """1: a step or evaluation used it or left it out, or a resumption gave it up."""

    dropped: int = 0
    """1: an operator removed it from the failures."""

    emptied: int = 0
    """1: its calls and transcripts were dropped to save space."""

    undone: int = STANDS
    """The resumption that undid its step or evaluation."""


class AttemptRow(Row, frozen=True, kw_only=True):
    """Attempt 0: the episode ended while no client held it."""

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
    policy_version: int

    lease_s: float
    failure: str | None = None
    """`protocol.Failure` as JSON."""


class CallRow(Row, frozen=True, kw_only=True):
    TABLE = "calls"
    PACKED = "call"
    CONSTRAINTS = OF_EPISODE
    INDEXES = ("(episode, attempt)",)

    episode: int
    attempt: int
    role: str
    """Empty: the main policy."""

    created: int
    """Unix time in seconds; 0: unknown."""

    policy_version: int
    last_version: int
    prompt_tokens: int
    """Prompt tokens that the previous call did not have."""

    sampled_tokens: int
    stop_reason: str
    call: bytes
    """`rollouts.call.Call` as msgpack, with digests for images. Empty if dropped."""


class ImageRow(Row, frozen=True, kw_only=True):
    """It stays when its calls are dropped."""

    TABLE = "images"
    KEY = ("digest",)
    KEEPS_FIRST = True

    digest: bytes

    file: bytes

    @property
    def size(self) -> int:
        return len(self.file)


class ResultRow(Row, frozen=True, kw_only=True):
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
    TABLE = "transcripts"
    PACKED = "transcript"
    KEY = ("episode", "attempt")
    CONSTRAINTS = OF_EPISODE

    episode: int
    attempt: int
    transcript: bytes
    """Inspect's `EvalSample` as JSON, from a client."""


class FactRow(Row, frozen=True, kw_only=True):
    TABLE = "facts"
    KEY = ("name",)

    name: str
    value: bytes


# What the trainer writes


class ResumptionRow(Row, frozen=True, kw_only=True):
    """A trainer started: a new run, or after a checkpoint's step."""

    TABLE = "resumptions"
    KEY = ("resumption",)
    ONCE = True

    resumption: int
    step: int
    time: float


class PublicationRow(Row, frozen=True, kw_only=True):
    TABLE = "publications"
    KEY = ("policy_version",)
    ONCE = True

    policy_version: int
    step: int
    time: float
    undone: int = STANDS


class StepRow(Row, frozen=True, kw_only=True):
    TABLE = "steps"
    KEY = ("step", "undone")
    ONCE = True

    step: int
    time: float
    policy_version: int
    reward: float | None = None
    accepted: int = 0
    failed: int = 0
    trained: int = 0
    """Episodes in the main policy's gradient."""

    max_lag: int | None = None
    stopped: str = ""
    undone: int = STANDS


class TrainedRow(Row, frozen=True, kw_only=True):
    TABLE = "trained"
    KEY = ("episode", "step", "role", "undone")
    CONSTRAINTS = OF_EPISODE
    INDEXES = ("(step)",)
    ONCE = True

    episode: int
    step: int
    role: str = ""
    outcome: str
    place: int = -1
    """Index of its group among those with gradients; -1: no gradient."""

    advantage: float | None = None
    reason: str = ""
    undone: int = STANDS


class VerdictRow(Row, frozen=True, kw_only=True):
    """It stands even if the step is undone."""

    TABLE = "verdicts"
    KEY = ("episode",)
    CONSTRAINTS = OF_EPISODE

    episode: int
    reward: float | None
    """Replaces the episode's reward. NULL: the judge failed, and the group did not train."""

    words: str = ""

    time: float


class TokensRow(Row, frozen=True, kw_only=True):
    TABLE = "tokens"
    PACKED = "sequences"
    KEY = ("episode", "step", "role", "undone")
    CONSTRAINTS = OF_EPISODE

    episode: int
    step: int
    role: str = ""
    sequences: bytes
    """`ledger.tokens.TrainedSequence`s as msgpack."""

    undone: int = STANDS


class CheckpointRow(Row, frozen=True, kw_only=True):
    TABLE = "checkpoints"
    KEY = ("step", "undone")

    step: int
    time: float
    policy_version: int
    train_seconds: float
    report: bytes = b"{}"
    role_reports: bytes = b"{}"
    """JSON: trained role -> alignment report."""

    curriculum: bytes = b"{}"
    """JSON: pass rates of the samples that have trained. Empty without a curriculum."""

    learners: bytes = b"{}"
    """JSON: trained role (empty: the policy) -> `train.learner.LearnerState`."""

    undone: int = STANDS


class EvaluationRow(Row, frozen=True, kw_only=True):
    TABLE = "evaluations"
    KEY = ("label", "step", "undone")
    ONCE = True

    label: str
    step: int
    time: float
    policy_version: int
    score: float | None
    margin: float | None = None
    """Half the width of the score's 95% interval."""

    accepted: int
    failed: int

    role_scores: bytes = b"{}"
    """JSON: trained role -> mean reward of accepted episodes that called it."""

    undone: int = STANDS


class MetricRow(Row, frozen=True, kw_only=True):
    TABLE = "metrics"
    KEY = ("name", "step", "undone")

    name: str
    step: int
    value: float
    undone: int = STANDS


class FindingRow(Row, frozen=True, kw_only=True):
    TABLE = "findings"
    INDEXES = ("(step)", "(step) WHERE kind = 'finding'")

    step: int
    kind: str
    """`finding`: about a step; `error`: about a sequence that did not train; `warning`."""

    name: str
    detail: str = ""
    episode: str = ""
    count: int = 1
    undone: int = STANDS


class NoteRow(Row, frozen=True, kw_only=True):
    TABLE = "notes"

    time: float
    text: str


class Use:
    TRAINED = "trained"
    SAME_REWARD = "same_reward"
    """Equal rewards in its group, so no gradient."""

    MISALIGNED = "misaligned"
    NOTHING_TO_TRAIN = "nothing_to_train"
    """A grammar constrained every token, or the last reply was cut (`training.mask_truncated`)."""

    GROUP_TOO_SMALL = "group_too_small"
    EVALUATED = "evaluated"
    LEFT_OUT = "left_out"
    """It failed, was cancelled, or no batch waited."""

    STALE = "stale"
    SET_ASIDE = "set_aside"
    """The run stopped because of it; it never trains."""

    GIVEN_UP = "given_up"
    """A resumption to the checkpoint of `step` could not use it."""


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
# In the order of writing: referring tables come later.
TABLES: tuple[type[Row], ...] = (
    FactRow,
    SampleRow,
    EpisodeRow,
    AttemptRow,
    CallRow,
    ImageRow,
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

# Resuming marks later steps' rows in these as undone.
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

_SQLITE = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}
_POSTGRES = {int: "bigint", float: "double precision", str: 'text COLLATE "C"', bytes: "bytea"}


@cache
def columns(kind: type[Row]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


@cache
def key_of(kind: type[Row]) -> Callable[[Row], Any]:
    return attrgetter(*kind.KEY)


@cache
def column_types(kind: type[Row]) -> dict[str, tuple[type, bool]]:
    return {field.name: _type_of(field.type) for field in msgspec.structs.fields(kind)}


def _type_of(annotation: Any) -> tuple[type, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        (kind,) = [each for each in get_args(annotation) if each is not type(None)]
        return kind, True
    return annotation, False


def create_statements(*, postgres: bool = False) -> list[str]:
    """`{s}` stands for the schema and a dot, or nothing."""
    types_of = _POSTGRES if postgres else _SQLITE
    number = "number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
    if not postgres:
        number = "number INTEGER PRIMARY KEY"
    found: list[str] = []
    for kind in TABLES:
        # SQLite 3.40 checks a table WITHOUT ROWID only if its key comes first.
        in_order = {name: column_types(kind)[name] for name in (*kind.KEY, *columns(kind))}
        lines = [
            f"{name} {types_of[of]}{'' if nullable else ' NOT NULL'}"
            for name, (of, nullable) in in_order.items()
        ]
        lines = [*lines, f"PRIMARY KEY ({', '.join(kind.KEY)})"] if kind.KEY else [number, *lines]
        # With row ids, SQLite would store a composite key twice. Without them, large columns are slow.
        is_key = len(kind.KEY) > 1 and bytes not in [of for of, _ in column_types(kind).values()]
        ends = " WITHOUT ROWID" if is_key and not postgres else ""
        body = ", ".join([*lines, *kind.CONSTRAINTS])
        found.append(f"CREATE TABLE {{s}}{kind.TABLE} ({body}){ends}")
        for place, index in enumerate(kind.INDEXES):
            found.append(f"CREATE INDEX {kind.TABLE}_{place} ON {{s}}{kind.TABLE} {index}")
    return found


@cache
def on_conflict(kind: type[Row]) -> str:
    if not kind.KEY or kind.ONCE:
        return ""
    key = f" ON CONFLICT ({', '.join(kind.KEY)})"
    others = [name for name in columns(kind) if name not in (*kind.KEY, *kind.FIXED)]
    if kind.KEEPS_FIRST or not others:
        return f"{key} DO NOTHING"
    return f"{key} DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in others)}"
