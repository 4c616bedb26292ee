"""Messages of the ZeroMQ link between trainer and server: msgspec structs, encoded as msgpack.

A frame holds a list of messages. Invariant: delivery is at least once in both directions, and every message
may arrive twice. Registrations are repeated until `Registered` and are idempotent by episode uuid; rows until
`Committed`, in the order of their numbers. Outcomes come in the order of their end numbers, and the trainer
says up to which it has them.
"""

from __future__ import annotations

import msgspec

from tinkerscript.ledger.history import History, Tally
from tinkerscript.ledger.rows import TrainerRow
from tinkerscript.limits import ID_CHARS, PAYLOAD_DEPTH, depth_is_beyond
from tinkerscript.protocol import POLICY, TRAINER_POOL, EngineStatus, EpisodeType, bounded, uuids_of_copies
from tinkerscript.rollouts.call import Call, calls_of, full_prompts
from tinkerscript.sampler import Progress, SampleRequest, SampleResult

LINK_VERSION = 16


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

    position: int = -1
    """The end number of the last outcome that the trainer has; -1: it takes none yet."""

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

    step: int = 0
    """The training step that plans it, or that its evaluation follows; 0: a client's own sample."""

    label: str = ""
    """Of its evaluation; empty for training."""

    position: int = -1
    """Of its sample in the order of training; -1 if it has none."""

    copies: int = 1
    """Episodes of the sample, this one included, which are registered together."""

    @property
    def uuids(self) -> list[str]:
        """Of the episode and its copies."""
        return uuids_of_copies(self.episode_uuid, self.copies)


class Register(Tagged, frozen=True):
    episodes: list[NewEpisode]


class Received(Tagged, frozen=True):
    """The trainer has the outcomes up to this end number, so that more may follow."""

    position: int


class Commit(Tagged, frozen=True):
    """Rows for the ledger, in one transaction. Answered by `Committed`."""

    number: int
    """From 1; the commits of a trainer are carried out in order, each once."""

    rows: list[TrainerRow]


class Resume(Tagged, frozen=True):
    """A trainer begins: where does it go on? Answered by `Resumed`."""

    request_id: int
    checkpoints: list[int]
    """The steps whose checkpoints are whole."""

    replay_lag: int = 0
    """Of how many steps before the next one it wants to know what they trained on."""

    plan_lag: int = 0
    """How many steps before the next one what can train in it may have been planned for."""


class Fetch(Tagged, frozen=True):
    """What did this episode end with, by sequence? Answered by `Fetched`."""

    request_id: int
    episode: int


class TallyRequest(Tagged, frozen=True):
    """How did the run's episodes end? Answered by `Tallied`, after everything sent before."""

    request_id: int


class Cancel(Tagged, frozen=True):
    """These episodes are no longer needed: unless they have ended, they fail with kind `cancelled`."""

    episode_uuids: list[str]
    reason: str


class ReleaseClient(Tagged, frozen=True):
    """This client is known to be dead: its claims are released at once."""

    client_uuid: str
    reason: str


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


class Committed(Tagged, frozen=True):
    """The commits of this trainer up to this number are in the ledger."""

    number: int


class Resumed(Tagged, frozen=True):
    """Answer to `Resume`. The outcomes that wait for the trainer follow."""

    request_id: int
    history: History


class RequestFailed(Tagged, frozen=True):
    """Answer to a `Request` that cannot be carried out."""

    request_id: int
    reason: str
    is_config: bool = False
    """Whether the user has to change something: the run cannot go on with this ledger."""


class Tallied(Tagged, frozen=True):
    """Answer to `TallyRequest`."""

    request_id: int
    tally: Tally


class _Ended(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    """How an episode ended."""

    number: int = 0
    """Its end number."""

    after: int = 0
    """The end number of the outcome that was sent before it: a trainer that lacks that one waits for both."""

    sequence: int = 0
    """Of the episode in the ledger."""

    episode_uuid: str
    episode_type: EpisodeType = "train"
    pool: str = TRAINER_POOL
    group_id: str = ""
    group_size: int = 0
    """Episodes in the group; 0 if the client that registered it did not say."""


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

    call_rewards: dict[str, float] = {}
    """Call id -> the part of `reward` that this call of the policy earned."""

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
    def earned(self) -> tuple[float, ...]:
        """What each call of the policy earned, up to the last one that earned anything by itself."""
        own = [self.call_rewards.get(call.call_id, 0.0) for call in self.calls] if self.call_rewards else []
        while own and not own[-1]:
            own.pop()
        return tuple(own)

    @property
    def policy_versions(self) -> set[int]:
        """Of all weights of this run that sampled any of it: the policy's, and those of roles that train."""
        return {version for call in self.all_calls if not call.is_foreign for version in call.policy_versions}

    def judged(self, reward: float) -> EpisodeAccepted:
        """The same with the reward that the judge of its group gave, in place of those of its program."""
        others = {role: own for role, own in self.role_rewards.items() if role != POLICY}
        return msgspec.structs.replace(self, reward=reward, role_rewards=others, call_rewards={})

    def failed(self, kind: str, message: str) -> EpisodeFailed:
        """The failure that training sees in its place; the ledger keeps the result."""
        failure: dict[str, object] = {
            "kind": kind,
            "message": message,
            "attempt": self.attempt,
            "client_uuid": self.client_uuid,
        }
        fields = (name for name in EpisodeFailed.__struct_fields__ if name != "failures")
        shared = {name: getattr(self, name) for name in fields}
        return EpisodeFailed(failures=[*self.retries, failure], **shared)

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


class Fetched(Tagged, frozen=True):
    """Answer to `Fetch`; None: the episode did not end with a result."""

    request_id: int
    outcome: EpisodeAccepted | None


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
    | Received
    | Commit
    | Resume
    | Fetch
    | TallyRequest
    | Cancel
    | ReleaseClient
    | Metrics
    | Sampled
    | SampleProgress
    | SampleFailed
)
"""What a trainer sends after its `Hello`."""

ToServer = Hello | FromTrainer

Request = Resume | Fetch | TallyRequest
"""What has a `request_id`, and an answer with the same."""

Answer = Resumed | Fetched | Tallied | RequestFailed

ToTrainer = (
    Welcome
    | Refused
    | Stop
    | Registered
    | NotRegistered
    | Cancelled
    | Committed
    | Resumed
    | Fetched
    | Tallied
    | RequestFailed
    | EpisodeAccepted
    | EpisodeFailed
    | Sample
    | CancelSample
)


QUARANTINED = "reward_out_of_bounds"
"""Failure kind of a recorded result whose reward would end the run (`errors.MAX_REWARD`)."""

JUDGE_FAILED = "judge_failed"
"""Failure kind of a recorded result whose group could not be judged."""

UNREADABLE = "calls_unreadable"
"""Failure kind of a recorded result whose calls are not one after another, and cannot be merged."""


def usable(outcome: Outcome) -> Outcome:
    """The outcome as training may see it: a result with a reward out of bounds, or calls that cannot be
    merged, is a failure.

    The ledger keeps the result itself.
    """
    if isinstance(outcome, EpisodeFailed):
        return outcome
    kind = QUARANTINED
    try:
        rewards = {"reward": outcome.reward, **outcome.role_rewards, **outcome.call_rewards}
        for name, reward in rewards.items():
            bounded(name, reward)
        kind = UNREADABLE
        for role in {call.role for call in outcome.all_calls}:
            full_prompts(calls_of(outcome.all_calls, role))
    except ValueError as error:
        return outcome.failed(kind, str(error))
    return outcome


def check_episode(episode: NewEpisode) -> None:
    """Raises ValueError for an episode that cannot be registered."""
    if not 0 < len(last := episode.uuids[-1]) <= ID_CHARS:
        raise ValueError(f"an episode uuid has 1 to {ID_CHARS} characters, not {len(last)}")
    try:
        payload = msgspec.json.decode(episode.payload, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the payload of an episode must be a JSON object: {error}") from error
    # No deeper than it has brackets: most payloads need no second look.
    brackets, depth = episode.payload.count(b"{") + episode.payload.count(b"["), PAYLOAD_DEPTH.limit
    if brackets > depth and depth_is_beyond(payload, depth):
        raise ValueError(f"the payload of an episode is nested more than {depth} deep; flatten it")
