"""Messages of the ZeroMQ link between trainer and server: msgspec structs, encoded as msgpack. Also what its
two ends share: frames, intervals, and the queue of outgoing messages.

A frame holds a list of messages; those queued in one tick of the event loop share a frame. Invariants:
delivery is at least once in both directions, and every message may arrive twice. Registrations are repeated
until `Registered`, results until `Acknowledge`; both are idempotent by episode uuid. A frame that cannot be
decoded is rejected as a whole, and no queue grows without bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec
import zmq.asyncio

from tinkerscript.errors import LinkError
from tinkerscript.limits import ID_CHARS, PAYLOAD_DEPTH, depth_is_beyond
from tinkerscript.protocol import POLICY, TRAINER_POOL, EngineStatus, EpisodeType
from tinkerscript.rollouts.call import Call, calls_of
from tinkerscript.sampler import Progress, SampleRequest, SampleResult

LINK_VERSION = 11


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


class _Ended(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    """How an episode ended: the server repeats it until it is acknowledged, and the journal keeps it."""

    episode_uuid: str
    episode_type: EpisodeType = "train"
    pool: str = TRAINER_POOL
    group_id: str = ""
    group_size: int = 0
    """Episodes in the group; 0 if the client that registered it did not say."""

    failed_calls: dict[int, list[Call]] = {}
    """Attempt -> the calls of an attempt that failed, for people; they never train. Those of early attempts
    may be missing, and the journal keeps none."""

    transcripts: dict[int, bytes] = {}
    """Attempt -> what its program left for people to read. Any may be missing, and the journal keeps none."""

    def without_extras(self) -> Self:
        """The outcome without what is only for people."""
        return msgspec.structs.replace(self, failed_calls={}, transcripts={})


class EpisodeAccepted(_Ended, frozen=True, kw_only=True, omit_defaults=True):
    """An episode's result, with the calls of the claim that produced it."""

    attempt: int
    client_uuid: str
    reward: float
    policy_version_at_claim: int
    all_calls: list[Call] = msgspec.field(name="calls")
    """Of every role, in the order in which they were recorded."""

    role_rewards: dict[str, float] = {}
    """What counts for a policy in place of `reward`, by the name of its role."""

    metadata: dict[str, object] = {}
    log_metrics: dict[str, float] = {}
    is_success: bool | None = None
    """Whether the attempt solved its sample; None if it did not say."""

    retries: list[dict[str, object]] = []
    """The `protocol.Failure` of each earlier attempt."""

    @property
    def calls(self) -> list[Call]:
        """The policy's."""
        return calls_of(self.all_calls)

    @property
    def policy_versions(self) -> set[int]:
        """Of all weights of this run that sampled any of it: the policy's, and those of roles that train."""
        return {version for call in self.all_calls if not call.is_foreign for version in call.policy_versions}

    def reward_of(self, role: str) -> float:
        """The reward of a policy of the run; an empty `role` is the run's own.

        Without one in `role_rewards`, that of a role is the score with its name, or else the episode's.
        """
        if not role:
            return self.role_rewards.get(POLICY, self.reward)
        return self.role_rewards.get(role, self.log_metrics.get(f"score/{role}", self.reward))


class EpisodeFailed(_Ended, frozen=True, kw_only=True, omit_defaults=True):
    """An episode that used all its attempts or was cancelled."""

    failures: list[dict[str, object]]
    """The `protocol.Failure` of each attempt."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the trainer cancelled it because it was no longer needed."""
        return bool(self.failures) and self.failures[-1].get("kind") == "cancelled"


Outcome = EpisodeAccepted | EpisodeFailed


class Sample(Tagged, frozen=True):
    request_id: int
    request: SampleRequest
    traceparent: str = ""
    """W3C trace context of the model call; empty without traces."""


class CancelSample(Tagged, frozen=True):
    """The caller of this sample is gone."""

    request_id: int


FromTrainer = (
    Register
    | Acknowledge
    | Cancel
    | ReleaseClient
    | OutcomesRequest
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
    | EpisodeAccepted
    | EpisodeFailed
    | Sample
    | CancelSample
)


def check_episode(episode: NewEpisode) -> None:
    """Raises ValueError for an episode that cannot be registered."""
    if not 0 < len(episode.episode_uuid) <= ID_CHARS:
        raise ValueError(f"an episode uuid has 1 to {ID_CHARS} characters, not {len(episode.episode_uuid)}")
    try:
        payload = msgspec.json.decode(episode.payload, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the payload of an episode must be a JSON object: {error}") from error
    # No deeper than it has brackets: most payloads need no second look.
    brackets, depth = episode.payload.count(b"{") + episode.payload.count(b"["), PAYLOAD_DEPTH.limit
    if brackets > depth and depth_is_beyond(payload, depth):
        raise ValueError(f"the payload of an episode is nested more than {depth} deep; flatten it")


logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 2**20
"""A peer that sends a larger frame is disconnected."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 2**20
"""Of one message: the rest is for what is around it. A larger one is never sent."""

FULL_FRAME_BYTES = 4 * 2**20
"""A frame is closed once it holds this much."""

MAX_QUEUED = 100_000
"""Limit of the send queue, in messages. Beyond it the oldest are dropped; whatever matters is repeated."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Intervals of the link, in seconds."""

    heartbeat_s: float = 1.0
    """Time between two `Hello` messages."""

    silence_s: float = 5.0
    """Time without a message after which the trainer counts as disconnected."""

    grace_s: float = 10.0
    """How long a model call waits for a trainer to connect."""

    resend_s: float = 5.0
    """Time after which an unconfirmed message is sent again."""


_encode = msgspec.msgpack.Encoder().encode
_decode_to_server = msgspec.msgpack.Decoder(list[ToServer]).decode
_decode_to_trainer = msgspec.msgpack.Decoder(list[ToTrainer]).decode


def _log_drop(reason: str, detail: str) -> None:
    logger.warning("link.drop reason=%s detail=%s", reason, detail)


def frames(messages: Iterable[Tagged], drop: Callable[[str, str], None] = _log_drop) -> Iterator[bytes]:
    """Pack messages into frames, in order.

    `drop(reason, detail)` is called for a message that cannot be written, or is too large: its frame would
    end the connection, and with it every other message, as often as it is repeated.
    """
    parts, size = list[msgspec.Raw](), 0
    for message in messages:
        try:
            encoded = _encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            drop("unencodable", f"{type(message).__name__}: {error}")
            continue
        if len(encoded) > MAX_MESSAGE_BYTES:
            drop("too_large", f"{type(message).__name__} of {len(encoded)} bytes")
            continue
        if parts and size + len(encoded) > MAX_MESSAGE_BYTES:
            yield _encode(parts)
            parts, size = [], 0
        parts.append(msgspec.Raw(encoded))
        size += len(encoded)
        if size >= FULL_FRAME_BYTES:
            yield _encode(parts)
            parts, size = [], 0
    if parts:
        yield _encode(parts)


def read_to_server(frame: bytes) -> list[ToServer]:
    """The messages of a trainer's frame. Raises LinkError."""
    try:
        return _decode_to_server(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"malformed frame of {len(frame)} bytes: {error}") from error


def read_to_trainer(frame: bytes) -> list[ToTrainer]:
    """The messages of a server's frame. Raises LinkError."""
    try:
        return _decode_to_trainer(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"malformed frame of {len(frame)} bytes: {error}") from error


def set_options(socket: zmq.asyncio.Socket, address: str) -> None:
    """Limits and reconnection, the same at both ends."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    # A stopped machine keeps its connections: without these a trainer would not reach the next server.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)


class Outbox:
    """The bounded queue of outgoing messages."""

    def __init__(self) -> None:
        self._messages: deque[Tagged] = deque()
        self._filled = asyncio.Event()
        self.dropped = 0

    def put(self, message: Tagged) -> None:
        if len(self._messages) >= MAX_QUEUED:
            self._messages.popleft()
            self.dropped += 1
        self._messages.append(message)
        self._filled.set()

    def put_latest(self, message: Tagged) -> None:
        """Put a message in place of those of its kind that are still queued."""
        kind = type(message)
        self._messages = deque(queued for queued in self._messages if not isinstance(queued, kind))
        self.put(message)

    def clear(self) -> None:
        """Drop what was queued for a peer that is gone."""
        self._messages.clear()

    async def take(self) -> list[Tagged]:
        """Wait for messages and return all that are queued."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        taken = list(self._messages)
        self._messages.clear()
        return taken
