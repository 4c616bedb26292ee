"""The words that clients and the interchange server exchange over HTTP, as pydantic models.

No I/O. Field names of the first version of the protocol keep their names and meanings;
requests and replies may carry more fields than these. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

EpisodeType = Literal["train", "eval"]
"""`train` episodes may train; `eval` episodes are scored and never train."""

ClaimType = Literal["train", "eval", "any"]

EngineStatus = Literal[
    "ENGINE.OFFLINE",
    "ENGINE.BOOTING",
    "ENGINE.ROLLING",
    "ENGINE.WEIGHT_SYNCING",
    "ENGINE.WEIGHT_EXPORTING",
]

NO_EPISODES = "No available episodes to claim."
"""The `fail_cause` by which a client of the first version knows to wait."""

WEIGHT_SYNCING = "Engine is syncing weights"
"""The `fail_cause` of a claim that arrives while new weights are being published."""

DEFAULT_ALLOW_DISCARD_TIMEOUT_S = 60.0


MAX_ID_CHARS = 200
"""Of a uuid, a client's name or a task id."""

TRAINER_POOL = ""
"""The pool of the episodes that the trainer registered."""

EpisodeId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Message(BaseModel):
    """Base of every message: unknown fields are allowed on the wire and kept out of the model."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class Failure(Message):
    """Why one attempt at an episode did not end with a result."""

    kind: str
    """A stable word: `lease_expired`, `aborted`, `task_error`, `worker_died`, `cancelled`, ..."""

    message: str = ""
    attempt: int = 0
    client_uuid: str = ""


class WorkflowOutput(Message):
    """What a rollout program hands back for one episode."""

    reward: float | list[float] | None = None
    """Higher is better. A list is summed. None is refused for an episode that ends with a result:
    an attempt without a reward is a failure, see `/abort_episode`."""

    is_success: bool | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    log_metrics: dict[str, float] = Field(default_factory=dict)


class RegisterEpisodeRequest(Message):
    """`POST /register_episode`: one attempt at one sample. Repeated with the same content it changes nothing.

    A client registers its own samples into the pool that its `client_uuid` names; the admin anywhere. (The
    trainer registers over its link.)
    """

    episode_uuid: EpisodeId
    client_uuid: str = Field(default="", max_length=MAX_ID_CHARS)
    """Who registers; also the name of the pool. Empty, the trainer's pool, is for the admin alone."""

    episode_type: EpisodeType = "train"
    task_id: str = Field(default="", max_length=MAX_ID_CHARS)
    """Names the sample: the episodes of one `task_id` in one pool are a group."""

    group_id: str = Field(default="", max_length=2 * MAX_ID_CHARS)
    """The group by its full name; empty: made of pool and `task_id`."""

    group_size: int = Field(default=0, ge=0, le=100_000)
    """Episodes that the group has in all; 0: the trainer's `training.group_size`."""

    payload: dict[str, JsonValue] = Field(default_factory=dict)
    """What the claim carries to the client that runs the episode."""

    openai_base_url: str = ""
    """Of the first version; ignored, since the server serves the model itself."""

    openai_api_key: str = Field(default="", repr=False)
    """Of the first version; ignored, since each claim has a key of its own."""

    zmq_listen_result_addr: str = ""
    """Of the first version; ignored, since results go over the one link."""


class RegisterEpisodeResponse(Message):
    success: bool
    """The episode is stored."""

    failure_reason: str = ""


class ClaimEpisodeRequest(Message):
    """`POST /claim_episode`."""

    client_uuid: EpisodeId
    """Who claims: the owner of the claims in the reply."""

    episode_type: ClaimType = "any"
    """Which episodes the client takes."""

    pool: str = Field(default=TRAINER_POOL, max_length=MAX_ID_CHARS)
    """Whose episodes: empty for the trainer's, else the `client_uuid` of the client that registered them."""

    claim_request_id: str = Field(default="", max_length=MAX_ID_CHARS)
    """New for every request and the same for its repetitions, which get the same claims and keys. Empty (the
    first version): a repetition is a request of its own."""

    allow_discard_timeout: float = Field(default=DEFAULT_ALLOW_DISCARD_TIMEOUT_S, gt=0, le=86_400)
    """Seconds without activity after which the claim lapses. A model call renews it."""

    wait_s: float = Field(default=0.0, ge=0, le=60)
    """Seconds that the server may hold the request until an episode is there."""

    max_episodes: int = Field(default=1, ge=1, le=256)
    """Episodes to claim at most; all but the first come in the reply's `more`."""

    sends_attempt: bool = False
    """The client will name `attempt` when it ends or aborts. To a client that does not (the first
    version), no episode is given twice: its `client_uuid` alone could not tell the claims apart."""


class EpisodeClaim(Message):
    """One claim of one episode."""

    client_uuid: str = ""
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = Field(default="", repr=False)
    attempt: int = 0
    """The number of this claim of the episode, from 1."""

    episode_type: EpisodeType = "train"
    group_id: str = ""
    payload: dict[str, JsonValue] = Field(default_factory=dict)
    policy_version: int | None = None
    """Policy version when the episode was claimed."""

    allow_discard_timeout: float = 0.0
    """Seconds without activity after which the claim lapses; `/heartbeat_episode` renews it."""

    max_claim_s: float = 0.0
    """Seconds after which the claim is over, however active it is."""


class ClaimEpisodeResponse(EpisodeClaim):
    """The first episode claimed, or why there is none."""

    success: bool
    more: list[EpisodeClaim] = Field(default_factory=list[EpisodeClaim])
    """The other episodes that the same request claimed."""

    fail_cause: str = ""
    retry_after_s: float = 0.0
    """On failure: seconds to wait before asking again."""


class EndEpisodeRequest(Message):
    """`POST /end_episode`. Clients of the first version send no `attempt`."""

    client_uuid: str
    episode_uuid: str
    workflow_output: WorkflowOutput
    attempt: int | None = None


class EndEpisodeResponse(Message):
    success: bool
    failure_reason: str = ""


class AbortEpisodeRequest(Message):
    """`POST /abort_episode`: the owner's attempt failed; the reason is recorded."""

    client_uuid: str
    episode_uuid: str
    failure: Failure
    attempt: int | None = None


class CanContinueEpisodeRequest(Message):
    """`POST /can_continue_episode` and `POST /heartbeat_episode`; both renew the lease."""

    client_uuid: str
    episode_uuid: str
    attempt: int | None = None
    """Number of the claim. Clients of the first version send none."""


class CanContinueEpisodeResponse(Message):
    can_continue: bool
    """Whether a result of this claim would still be taken."""

    reason: str = ""
    """Why not; empty while the episode still counts."""

    policy_version_at_claim: int | None = None
    """Policy version when the episode was claimed."""

    policy_version: int | None = None
    """The engine's current policy version."""


class EpisodeCounts(Message):
    """How many episodes are in each state. `accepted` and `failed` only grow."""

    registered: int = 0
    claimed: int = 0
    ended: int = 0
    """Result stored, not yet acknowledged by the trainer."""

    accepted: int = 0
    failed: int = 0


class EpisodeStatus(Message):
    """One episode as `/get_episode_buffer` and `/failed_episodes` show it. Holds no secret."""

    episode_uuid: str
    client_uuid: str = ""
    """Owner of the last claim; empty before the first."""

    episode_status: str
    """`registered`, `claimed`, `ended`, `accepted` or `failed`."""

    openai_base_url: str = ""
    openai_api_key: Literal[""] = ""
    """Always empty: a claim's key is told to its owner alone."""

    zmq_listen_result_addr: str = ""
    latest_activity_timestamp: float = 0.0
    """Unix time of the claim's last activity; 0 before the first claim."""

    attempt: int = 0
    """Number of the last claim; 0 before the first."""

    episode_type: EpisodeType
    pool: str = TRAINER_POOL
    group_id: str = ""
    policy_version: int | None = None
    """Policy version at the last claim; None before the first."""

    failures: list[Failure] = Field(default_factory=list[Failure])
    """Why each attempt so far ended without a result."""

    acknowledged: bool = False
    """The trainer has the outcome in its journal."""


class GetEpisodeBufferRequest(Message):
    """`POST /get_episode_buffer`; an empty object asks for the first page of everything not acknowledged."""

    limit: int = Field(default=1000, ge=1, le=10_000)
    """Episodes in one reply at most."""

    after: int = Field(default=0, ge=0)
    """Go on after this number: `next` of the page before."""


class GetEpisodeBufferResponse(Message):
    buffer: list[EpisodeStatus]
    """Episodes that are not over and acknowledged, in the order of registration."""

    next: int | None = None
    """`after` of the next page; None on the last."""


class FailedEpisodesResponse(Message):
    """`GET /failed_episodes`: the dead letters, each with the reason of every attempt."""

    episodes: list[EpisodeStatus]
    next: int | None = None
    """`after` of the next page; None on the last."""


class FailedEpisodesRequest(Message):
    """`POST /failed_episodes/retry` and `POST /failed_episodes/drop`."""

    episode_uuids: list[str] = Field(max_length=10_000)


class FailedEpisodesReply(Message):
    success: bool
    """Whether it was done for every episode named."""

    done: list[str]
    """Uuids of the episodes that it was done for."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Uuid -> why not, of the others."""


class EngineStatusResponse(Message):
    engine_status: EngineStatus
    policy_version: int
    """Of the newest published weights; -1 before the first."""

    global_step: int
    """Training steps done."""

    model: str
    episodes: dict[EpisodeType, EpisodeCounts]
    """How many episodes of each type are in each state, over all pools."""

    pools: dict[str, EpisodeCounts] = Field(default_factory=dict[str, EpisodeCounts])
    """The same for each pool; the trainer's has an empty name."""

    waiting_clients: int = 0
    """Clients in long polls."""

    active_clients: int = 0
    """Clients that hold a claim."""

    trainer_connected: bool


class StartEngineRequest(Message):
    """`POST /start_engine`: no fields; the config is the one of `/sync_train_config`."""


class UpdateEngineStatusRequest(Message):
    engine_status: EngineStatus


class SuccessResponse(Message):
    """The answer to `/abort_episode`, `/start_engine`, `/stop_engine` and `/update_engine_status`."""

    success: bool
    failure_reason: str = ""


class SyncTrainConfigRequest(Message):
    yaml_as_string: str


class SyncTrainConfigResponse(Message):
    success: bool
    error: str = ""


class HealthResponse(Message):
    status: Literal["ok"] = "ok"
    version: str


class RefusalResponse(Message):
    """The body of every 4xx reply outside the gateway."""

    success: Literal[False] = False
    failure_reason: str


def total_reward(output: WorkflowOutput) -> float | None:
    """The episode's scalar reward: a list is summed; None if there is none."""
    reward = output.reward
    if reward is None:
        return None
    return float(sum(reward)) if isinstance(reward, list) else float(reward)


def json_object(value: Any) -> dict[str, JsonValue]:
    """`value` as a JSON object; raises ValueError naming the type otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value
