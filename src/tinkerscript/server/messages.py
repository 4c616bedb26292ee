"""Messages of the ZeroMQ link between trainer and server: msgspec structs, encoded as msgpack.

One frame holds a list of messages. Delivery is at least once in both directions: registrations are
repeated until `Registered`, results until `Acknowledge`; both are idempotent by episode uuid.
"""

from __future__ import annotations

import msgspec

from tinkerscript.gateway.sampler import SampleRequest, SampleResult
from tinkerscript.rollouts.call import Call

LINK_VERSION = 1


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the message's tag on the wire."""


# Trainer -> server


class Hello(Tagged):
    """First message of a trainer, repeated as its heartbeat."""

    link_version: int
    trainer_id: str
    """New for every trainer process."""

    policy_version: int
    global_step: int
    engine_status: str
    model: str


class NewEpisode(Tagged):
    """One episode to register."""

    episode_uuid: str
    episode_type: str
    group_id: str
    payload: bytes
    """JSON object."""


class Register(Tagged):
    episodes: list[NewEpisode]


class Acknowledge(Tagged):
    """These results and failures are durable in the trainer's journal."""

    episode_uuids: list[str]


class Cancel(Tagged):
    """These episodes are no longer needed; they end as failed with kind `cancelled`."""

    episode_uuids: list[str]
    reason: str


class ReleaseClient(Tagged):
    """This client is known to be dead: its claims lapse at once."""

    client_uuid: str
    reason: str


class Sampled(Tagged):
    request_id: int
    result: SampleResult


class SampleFailed(Tagged):
    request_id: int
    status: int
    code: str
    message: str


# Server -> trainer


class Welcome(Tagged):
    """Answer to `Hello`."""

    link_version: int
    server_id: str
    """New for every server process."""


class Registered(Tagged):
    episode_uuids: list[str]


class Result(Tagged):
    """An accepted result with the calls of the claim that produced it; repeated until acknowledged."""

    episode_uuid: str
    episode_type: str
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


class EpisodeFailed(Tagged):
    """The episode used up its attempts or was cancelled; repeated until acknowledged."""

    episode_uuid: str
    episode_type: str
    group_id: str
    failures: bytes
    """JSON list of `Failure`, one for each attempt."""


class Sample(Tagged):
    request_id: int
    request: SampleRequest


class CancelSample(Tagged):
    """Nobody waits for this sample any more."""

    request_id: int


ToServer = Hello | Register | Acknowledge | Cancel | ReleaseClient | Sampled | SampleFailed
ToTrainer = Welcome | Registered | Result | EpisodeFailed | Sample | CancelSample
