"""Messages of the ZeroMQ link between trainer and server: msgspec structs, encoded as msgpack.

A frame holds a list of messages. Invariant: delivery is at least once in both directions, and every message
may arrive twice. Registrations are repeated until `Registered`, results until `Acknowledge`; both are
idempotent by episode uuid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tinkerscript.gateway.sampler import Progress, SampleRequest, SampleResult
from tinkerscript.protocol import TRAINER_POOL, EngineStatus, EpisodeType
from tinkerscript.rollouts.call import Call

LINK_VERSION = 8


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the message's tag on the wire."""


# Trainer -> server


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer waits for. See `protocol.BatchProgressResponse`."""

    label: str
    rule: str
    needed: int
    have: int
    episodes_ended: int
    episodes_expected: int
    groups_needed: int
    """Groups that a batch needs, whatever its rule counts."""

    groups_ahead: dict[str, int] = {}


class Hello(Tagged, frozen=True):
    """First message of a trainer, repeated as its heartbeat."""

    link_version: int
    trainer_id: str
    """Unique to the trainer process."""

    policy_version: int
    global_step: int
    engine_status: EngineStatus
    model: str
    usable_versions: list[int] | None = None
    """Policy versions whose results the lag rule lets train in the batch that takes results now; None: the
    trainer has no such rule."""

    client_samples: bool = True
    """Whether samples that clients register may train."""

    batch: BatchProgress | None = None
    """The batch that is being filled; None while there is none."""

    run_finished: bool = False
    """Whether the run has reached its end."""

    failure: str = ""
    """Why the trainer leaves before the run's end; empty if it was stopped, or has not failed."""

    number: int = 0
    """Grows with every Hello of a trainer; the `Welcome` that answers it carries the same number."""

    started_ns: int = 0
    """Unix time in nanoseconds at which the trainer started. The trainer that started last owns the server: a
    dead trainer's frame may arrive after its successor's."""


class NewEpisode(Tagged, frozen=True):
    """One episode to register."""

    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    payload: bytes
    """JSON object."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    """Number of episodes in the group; 0 if unknown."""


class Register(Tagged, frozen=True):
    episodes: list[NewEpisode]


class Acknowledge(Tagged, frozen=True):
    """These results and failures are durable in the trainer's journal."""

    episode_uuids: list[str]


class Cancel(Tagged, frozen=True):
    """These episodes are no longer needed: unless they have ended, they fail with kind `cancelled`."""

    episode_uuids: list[str]
    reason: str


class ReleaseClient(Tagged, frozen=True):
    """This client is known to be dead: its claims are released at once."""

    client_uuid: str
    reason: str


class OutcomesRequest(Tagged, frozen=True):
    """What does the server's store hold about these episodes? Answered by `Outcomes`."""

    request_id: int
    episode_uuids: list[str]


class Sampled(Tagged, frozen=True):
    request_id: int
    result: SampleResult


class SampleProgress(Tagged, frozen=True):
    """Tokens sampled since the previous report. Sent once; nothing depends on it."""

    request_id: int
    reports: list[Progress]


class SampleFailed(Tagged, frozen=True):
    request_id: int
    status: int
    code: str
    message: str
    param: str | None = None
    """The field of the caller's request that caused the failure."""


class OfferRecord(Tagged, frozen=True):
    """Does the server see the record that this trainer writes? Answered by `RecordState`."""

    session: str
    """Of the record's writer, unique to this trainer's start."""

    identity: str
    """The session of the record's first writer."""

    limit_mb: int
    """Of its calls and tokens; 0: no limit."""


class RecordPart(Tagged, frozen=True):
    """A piece of a packed batch of the record's rows (`record.rows`). The last one is answered by
    `RecordState`, the others by `PartTaken`; the next piece follows the answer."""

    session: str
    batch: int
    """Counts from 1 in a session."""

    part: int
    """Counts from 0 in a batch."""

    is_last: bool
    data: bytes


class Metrics(Tagged, frozen=True):
    """The trainer's metrics, as text for Prometheus: the server's `/metrics` has them."""

    text: bytes


# Server -> trainer


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to do for workers."""

    waiting: int = 0
    """Episodes of the trainer that no client has claimed."""

    own_claims: dict[str, int] = {}
    """Workers that the trainer has started -> the claims that they hold; those without any are left out."""


class Welcome(Tagged, frozen=True):
    """Answer to `Hello`."""

    link_version: int
    server_id: str
    """Unique to the server process."""

    number: int
    """The number of the `Hello` that this answers: everything the trainer sent before it is committed.
    0 in the first message to a trainer that has just connected, which promises nothing."""

    results_accepted: int = 0
    """Results that any trainer has acknowledged, by the server's own count; 0 in the first message."""

    quarantined: dict[str, str] = {}
    """Clients that get no episodes because their attempts only fail -> why."""

    demand: Demand = Demand()


class Refused(Tagged, frozen=True):
    """The server does not accept this trainer: another one took over, or the link versions differ."""

    reason: str


class Stop(Tagged, frozen=True):
    """Asks the trainer to shut down cleanly. The run can be resumed."""

    reason: str


class NotRegistered(Tagged, frozen=True):
    """The episode cannot be registered; a retry would fail too."""

    episode_uuid: str
    reason: str


class Registered(Tagged, frozen=True):
    episode_uuids: list[str]


class Cancelled(Tagged, frozen=True):
    """Answer to `Cancel`: these are cancelled, had ended before, or are unknown."""

    episode_uuids: list[str]


class RecordedOutcome(NamedTuple):
    """What the server's store holds about one episode."""

    state: str
    """`registered`, `claimed`, `ended`, `accepted` or `failed`."""

    acknowledged: bool
    """Whether a trainer acknowledged the outcome."""


class Outcomes(Tagged, frozen=True):
    """Answer to `OutcomesRequest`, after everything that the trainer sent before it was committed."""

    request_id: int
    outcomes: dict[str, RecordedOutcome]
    """By episode uuid; unknown episodes are left out."""


class Result(Tagged, frozen=True):
    """A result and the calls of the claim that produced it; repeated until acknowledged."""

    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    attempt: int
    client_uuid: str
    reward: float
    workflow_output: bytes
    """JSON of `WorkflowOutput`."""

    calls: list[Call]
    policy_version_at_claim: int
    failures: bytes
    """JSON list of `Failure`, one for each earlier attempt."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    failed_calls: dict[int, list[Call]] = {}
    """Attempt -> calls, of attempts that failed, for the run's record; they never train. Those of early
    attempts may be missing."""

    transcripts: dict[int, bytes] = {}
    """Attempt -> what its program left for people to read, as it came. Any may be missing."""


class FailedEpisode(Tagged, frozen=True):
    """The episode used all its attempts or was cancelled; repeated until acknowledged."""

    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    failures: bytes
    """JSON list of `Failure`, one for each attempt."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    failed_calls: dict[int, list[Call]] = {}
    transcripts: dict[int, bytes] = {}
    """Both as in `Result`."""


class Sample(Tagged, frozen=True):
    request_id: int
    request: SampleRequest
    traceparent: str = ""
    """W3C trace context of the model call; empty without traces."""


class CancelSample(Tagged, frozen=True):
    """The caller of this sample is gone."""

    request_id: int


class RecordState(Tagged, frozen=True):
    """What the server has of the trainer's record. Repeats what it was asked by."""

    session: str
    batch: int = 0
    """0: this answers an `OfferRecord`."""

    is_shared: bool = False
    """Whether the server reads the very file that the trainer writes."""

    problem: str = ""
    """Why the record is not mirrored; empty if it is."""

    marks: bytes = b""
    """`record.rows.Marks` as msgpack; empty if the record is to be offered again."""


class PartTaken(Tagged, frozen=True):
    """Answer to a `RecordPart` that is not the last of its batch."""

    session: str
    batch: int
    part: int


FromTrainer = (
    Register
    | Acknowledge
    | Cancel
    | ReleaseClient
    | OutcomesRequest
    | OfferRecord
    | RecordPart
    | Metrics
    | Sampled
    | SampleProgress
    | SampleFailed
)
"""What a trainer sends after its `Hello`."""

ToServer = Hello | FromTrainer

ToTrainer = (
    Welcome
    | Refused
    | Stop
    | Registered
    | NotRegistered
    | Cancelled
    | Outcomes
    | RecordState
    | PartTaken
    | Result
    | FailedEpisode
    | Sample
    | CancelSample
)


MAX_UUID_CHARS = 200


MAX_PAYLOAD_DEPTH = 64
"""Objects and lists in a payload that may lie inside each other. JSON parsers give up at about 200."""


def check_episode(episode: NewEpisode) -> None:
    """Raises ValueError for an episode that cannot be registered."""
    if not 0 < len(episode.episode_uuid) <= MAX_UUID_CHARS:
        raise ValueError(
            f"an episode uuid has 1 to {MAX_UUID_CHARS} characters, not {len(episode.episode_uuid)}"
        )
    try:
        payload = msgspec.json.decode(episode.payload, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the payload of an episode must be a JSON object: {error}") from error
    # No deeper than it has brackets: most payloads need no second look.
    if episode.payload.count(b"{") + episode.payload.count(b"[") > MAX_PAYLOAD_DEPTH:
        _check_depth(payload)


def _check_depth(payload: object) -> None:
    """Raises ValueError for a payload that is nested more than `MAX_PAYLOAD_DEPTH` deep."""
    level: list[object] = [payload]
    for _ in range(MAX_PAYLOAD_DEPTH):
        level = [item for value in level if isinstance(value, dict | list) for item in _items(value)]
        if not level:
            return
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(f"the payload of an episode is nested more than {MAX_PAYLOAD_DEPTH} deep")


def _items(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value
