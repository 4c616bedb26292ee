"""Messages of the ZeroMQ link between trainer and server: msgspec structs in msgpack.

Delivery is at least once. Registrations repeat until `Registered` and are idempotent by episode uuid. Rows
repeat until `Committed`, in order. Outcomes arrive in order of their end numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from tinkerscript.ledger.history import History, Tally
from tinkerscript.ledger.rows import TrainerRow
from tinkerscript.limits import ID_CHARS, PAYLOAD_DEPTH, depth_is_beyond
from tinkerscript.protocol import POLICY, TRAINER_POOL, EngineStatus, EpisodeType, bounded, uuids_of_copies
from tinkerscript.rollouts.call import Call, calls_of, full_prompts
from tinkerscript.sampler import Progress, SampleRequest, SampleResult

LINK_VERSION = 17


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The class name is the tag on the wire."""


# Trainer -> server


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """See `protocol.BatchProgressResponse`."""

    label: str
    rule: str
    needed: int
    have: int
    episodes_ended: int
    episodes_expected: int
    groups_ahead: dict[str, int] = {}


class Hello(Tagged, frozen=True):
    """The trainer's state, and its heartbeat."""

    link_version: int
    trainer_id: str
    policy_version: int
    global_step: int
    engine_status: EngineStatus
    model: str
    usable_versions: list[int] | None = None
    """Versions that the lag rule admits to this batch; None without a rule."""

    client_samples: bool = True
    batch: BatchProgress | None = None
    run_finished: bool = False
    failure: str = ""  # Why the trainer leaves.
    position: int = -1
    """End number of the trainer's last outcome; -1 before the first."""

    number: int = 0  # Increases; `Welcome` repeats it.
    started_ns: int = 0
    """In Unix nanoseconds. The latest trainer owns the server."""


class NewEpisode(Tagged, frozen=True):
    episode_uuid: str
    episode_type: EpisodeType
    group_id: str
    payload: bytes  # A JSON object.
    pool: str = TRAINER_POOL
    group_size: int = 0  # 0: unknown.
    step: int = 0
    """The step that plans or precedes it; 0 for a client's sample."""

    label: str = ""  # The evaluation's name, or empty for training.
    position: int = -1  # In the training order, or -1.
    copies: int = 1  # Registered together.

    @property
    def uuids(self) -> list[str]:
        return uuids_of_copies(self.episode_uuid, self.copies)


class Register(Tagged, frozen=True):
    episodes: list[NewEpisode]


class Received(Tagged, frozen=True):
    position: int


class Commit(Tagged, frozen=True):
    """Writes rows in one transaction."""

    number: int  # From 1. Each trainer's commits run once, in order.
    rows: list[TrainerRow]


class Resume(Tagged, frozen=True):
    request_id: int
    checkpoints: list[int]
    replay_lag: int = 0
    """Earlier steps with trained episodes that the trainer needs."""

    plan_lag: int = 0
    """Earlier steps that may have planned the next one's episodes."""


class Fetch(Tagged, frozen=True):
    request_id: int
    episode: int


class TallyRequest(Tagged, frozen=True):
    """Asks how episodes ended, counting everything sent before."""

    request_id: int


class Cancel(Tagged, frozen=True):
    """Fails unfinished episodes with kind `cancelled`."""

    episode_uuids: list[str]
    reason: str


class ReleaseClient(Tagged, frozen=True):
    client_uuid: str
    reason: str


class Sampled(Tagged, frozen=True):
    request_id: int
    result: SampleResult


class SampleProgress(Tagged, frozen=True):
    """Tokens sampled since the last report. Sent once."""

    request_id: int
    reports: list[Progress]


class SampleFailed(Tagged, frozen=True):
    request_id: int
    status: int
    code: str
    message: str
    param: str | None = None  # The request's field at fault.


class Metrics(Tagged, frozen=True):
    """The trainer's metrics, in Prometheus' text format."""

    text: bytes


# Server -> trainer


class Welcome(Tagged, frozen=True):
    link_version: int
    server_id: str
    number: int
    """The `Hello` that this answers; everything sent before it is committed. 0 on a new connection."""

    quarantined: dict[str, str] = {}
    """Client -> why it gets no episodes."""


class Refused(Tagged, frozen=True):
    reason: str


class Stop(Tagged, frozen=True):
    """Ends the run, which can be resumed."""

    reason: str


class NotRegistered(Tagged, frozen=True):
    episode_uuid: str
    reason: str


class Registered(Tagged, frozen=True):
    episode_uuids: list[str]


class Cancelled(Tagged, frozen=True):
    """The episodes are cancelled, had ended before, or are unknown."""

    episode_uuids: list[str]


class Committed(Tagged, frozen=True):
    number: int


class Resumed(Tagged, frozen=True):
    """Waiting outcomes follow."""

    request_id: int
    history: History


class RequestFailed(Tagged, frozen=True):
    request_id: int
    reason: str
    is_config: bool = False  # The user must change something first.


class Tallied(Tagged, frozen=True):
    request_id: int
    tally: Tally


class _Ended(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    number: int = 0
    after: int = 0
    """End number of the previous outcome. A trainer without it waits for both."""

    sequence: int = 0
    episode_uuid: str
    episode_type: EpisodeType = "train"
    pool: str = TRAINER_POOL
    group_id: str = ""
    group_size: int = 0  # 0: unknown.


class EpisodeAccepted(_Ended, frozen=True, kw_only=True, omit_defaults=True):
    attempt: int
    client_uuid: str
    reward: float
    all_calls: list[Call] = msgspec.field(name="calls")  # All roles' calls, in recorded order.
    role_rewards: dict[str, float] = {}
    call_rewards: dict[str, float] = {}
    """Policy call's id -> its share of `reward`."""

    metadata: dict[str, object] = {}
    log_metrics: dict[str, float] = {}
    is_success: bool | None = None  # None: unknown.
    retries: list[dict[str, object]] = []

    @property
    def calls(self) -> list[Call]:
        return calls_of(self.all_calls)

    @property
    def earned(self) -> tuple[float, ...]:
        """Each policy call's reward, up to the last with a share."""
        own = [self.call_rewards.get(call.call_id, 0.0) for call in self.calls] if self.call_rewards else []
        while own and not own[-1]:
            own.pop()
        return tuple(own)

    @property
    def policy_versions(self) -> set[int]:
        return {version for call in self.all_calls if not call.is_foreign for version in call.policy_versions}

    def judged(self, reward: float) -> EpisodeAccepted:
        others = {role: own for role, own in self.role_rewards.items() if role != POLICY}
        return msgspec.structs.replace(self, reward=reward, role_rewards=others, call_rewards={})

    def failed(self, kind: str, message: str) -> EpisodeFailed:
        """Training sees the failure; the ledger keeps the result."""
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
        if not role:
            return self.role_rewards.get(POLICY, self.reward)
        return self.role_rewards.get(role, self.log_metrics.get(f"score/{role}", self.reward))


class EpisodeFailed(_Ended, frozen=True, kw_only=True, omit_defaults=True):
    """Used all its attempts or was cancelled."""

    failures: list[dict[str, object]]

    @property
    def is_cancelled(self) -> bool:
        return bool(self.failures) and self.failures[-1].get("kind") == "cancelled"


Outcome = EpisodeAccepted | EpisodeFailed


class Fetched(Tagged, frozen=True):
    """None if the episode has no result."""

    request_id: int
    outcome: EpisodeAccepted | None


class Sample(Tagged, frozen=True):
    request_id: int
    request: SampleRequest


class CancelSample(Tagged, frozen=True):
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
ToServer = Hello | FromTrainer

Request = Resume | Fetch | TallyRequest

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


# Failure kinds of results that cannot train.
QUARANTINED = "reward_out_of_bounds"  # Beyond `errors.MAX_REWARD`.
JUDGE_FAILED = "judge_failed"
UNREADABLE = "calls_unreadable"  # Its calls do not follow each other.
SCORE_MISSING = "score_missing"  # `training.reward_weights` names it.
TEACHER_CANNOT_READ = "teacher_cannot_read"


def scores_of(outcome: EpisodeAccepted) -> dict[str, float]:
    return {name.removeprefix("score/"): value for name, value in outcome.log_metrics.items()}


def usable(
    outcome: Outcome,
    scores: Collection[str] = (),
    check_for_teacher: Callable[[EpisodeAccepted], None] | None = None,
) -> Outcome:
    """Fail a result that would end the step: one with a reward out of bounds, calls that cannot be merged, a
    missing score, or something that the teacher cannot read (a ValueError of `check_for_teacher`)."""
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
        kind = SCORE_MISSING
        found = scores_of(outcome)
        missing = sorted(set(scores) - found.keys())
        if missing and outcome.episode_type == "train":
            raise ValueError(
                f"training.reward_weights needs the score {missing[0]!r}, and the scores of this episode are "
                f"{', '.join(sorted(found)) or 'none'}: end it with scores of these names"
            )
        kind = TEACHER_CANNOT_READ
        if check_for_teacher is not None and outcome.episode_type == "train":
            check_for_teacher(outcome)
    except ValueError as error:
        return outcome.failed(kind, str(error))
    return outcome


def check_episode(episode: NewEpisode) -> None:
    if not 0 < len(last := episode.uuids[-1]) <= ID_CHARS:
        which = f" with the number of the last copy, #{episode.copies}," if episode.copies > 1 else ""
        raise ValueError(f"episode_uuid:{which} has {len(last)} characters; 1 to {ID_CHARS} are allowed")
    try:
        payload = msgspec.json.decode(episode.payload, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"payload: must be a JSON object: {error}") from error
    brackets, depth = episode.payload.count(b"{") + episode.payload.count(b"["), PAYLOAD_DEPTH.limit
    if brackets > depth and depth_is_beyond(payload, depth):
        raise ValueError(f"payload: is nested more than {depth} deep; flatten it")
