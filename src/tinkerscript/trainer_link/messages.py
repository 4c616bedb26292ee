"""Messages of the ZeroMQ link between trainer and server: msgspec structs, encoded as msgpack.

One frame holds a list of messages. Delivery is at least once in both directions: registrations are
repeated until `Registered`, results until `Acknowledge`; both are idempotent by episode uuid.
"""

from __future__ import annotations

import msgspec

from tinkerscript.gateway.sampler import Progress, SampleRequest, SampleResult
from tinkerscript.protocol import TRAINER_POOL, EngineStatus, EpisodeType
from tinkerscript.rollouts.call import Call

LINK_VERSION = 3


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the message's tag on the wire."""


# Trainer -> server


class Hello(Tagged, frozen=True):
    """First message of a trainer, repeated as its heartbeat."""

    link_version: int
    trainer_id: str
    """New for every trainer process."""

    policy_version: int
    global_step: int
    engine_status: EngineStatus
    model: str
    number: int = 0
    """Grows with every Hello of a trainer; the `Welcome` that answers it repeats it."""

    started_ns: int = 0
    """Unix time in nanoseconds at which this trainer began: the later one is the server's. A frame of a dead
    trainer may arrive after its successor's."""


class NewEpisode(Tagged, frozen=True):
    """One episode to register."""

    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    payload: bytes
    """JSON object."""

    pool: str = TRAINER_POOL
    group_size: int = 0
    """Episodes that the group has in all; 0 if whoever registered did not say."""


class Register(Tagged, frozen=True):
    episodes: list[NewEpisode]


class Acknowledge(Tagged, frozen=True):
    """These results and failures are durable in the trainer's journal."""

    episode_uuids: list[str]


class Cancel(Tagged, frozen=True):
    """These episodes are no longer needed; they end as failed with kind `cancelled`."""

    episode_uuids: list[str]
    reason: str


class ReleaseClient(Tagged, frozen=True):
    """This client is known to be dead: its claims lapse at once."""

    client_uuid: str
    reason: str


class Sampled(Tagged, frozen=True):
    request_id: int
    result: SampleResult


class SampleProgress(Tagged, frozen=True):
    """Tokens that were sampled since the last of these; sent once, and nothing depends on it."""

    request_id: int
    reports: list[Progress]


class SampleFailed(Tagged, frozen=True):
    request_id: int
    status: int
    code: str
    message: str
    param: str | None = None
    """The caller's field that is to blame."""


# Server -> trainer


class Welcome(Tagged, frozen=True):
    """Answer to `Hello`."""

    link_version: int
    server_id: str
    """New for every server process."""

    number: int = 0
    """Of the `Hello` that this answers. All that the trainer sent before that Hello is committed.
    0 in the first message to a trainer that has just connected, before anything is."""


class Refused(Tagged, frozen=True):
    """This trainer is not the server's: another one took over, or it speaks another link version."""

    reason: str


class Stop(Tagged, frozen=True):
    """Somebody asked the engine to stop: the trainer ends its run in order. It may be resumed."""

    reason: str


class NotRegistered(Tagged, frozen=True):
    """The episode cannot be registered; repeating it would not help."""

    episode_uuid: str
    reason: str


class Registered(Tagged, frozen=True):
    episode_uuids: list[str]


class Cancelled(Tagged, frozen=True):
    """Answer to `Cancel`: these are cancelled, or were over before, or are not known."""

    episode_uuids: list[str]


class Result(Tagged, frozen=True):
    """An accepted result with the calls of the claim that produced it; repeated until acknowledged."""

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
    """JSON list of `Failure`: the attempts before this one."""

    pool: str = TRAINER_POOL
    group_size: int = 0


class FailedEpisode(Tagged, frozen=True):
    """The episode used up its attempts or was cancelled; repeated until acknowledged."""

    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    failures: bytes
    """JSON list of `Failure`, one for each attempt."""

    pool: str = TRAINER_POOL
    group_size: int = 0


class Sample(Tagged, frozen=True):
    request_id: int
    request: SampleRequest


class CancelSample(Tagged, frozen=True):
    """Nobody waits for this sample any more."""

    request_id: int


ToServer = Hello | Register | Acknowledge | Cancel | ReleaseClient | Sampled | SampleProgress | SampleFailed


ToTrainer = (
    Welcome
    | Refused
    | Stop
    | Registered
    | NotRegistered
    | Cancelled
    | Result
    | FailedEpisode
    | Sample
    | CancelSample
)


MAX_UUID_CHARS = 200


def check_episode(episode: NewEpisode) -> None:
    """Raises ValueError for an episode that cannot be registered."""
    if not 0 < len(episode.episode_uuid) <= MAX_UUID_CHARS:
        raise ValueError(
            f"an episode uuid has 1 to {MAX_UUID_CHARS} characters, not {len(episode.episode_uuid)}"
        )
    try:
        msgspec.json.decode(episode.payload, type=dict)
    except msgspec.DecodeError as error:
        raise ValueError(f"the payload of an episode must be a JSON object: {error}") from error
