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
    """What happened, for people."""

    attempt: int = 0
    """The number of the claim; 0 if the episode was not claimed."""

    client_uuid: str = ""
    """Owner of that claim; empty if the episode was not claimed."""


class WorkflowOutput(Message):
    """What a rollout program hands back for one episode."""

    reward: float | list[float] | None = None
    """Higher is better. A list is summed. None is refused for an episode that ends with a result:
    an attempt without a reward is a failure, see `/abort_episode`."""

    is_success: bool | None = None
    """Whether the attempt solved its sample; null if that has no meaning."""

    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything worth keeping with the result; `interchange_server.max_metadata_bytes` limits the whole
    output."""

    log_metrics: dict[str, float] = Field(default_factory=dict)
    """Numbers that the trainer averages and logs."""


class RegisterEpisodeRequest(Message):
    """`POST /register_episode`: one attempt at one sample. Repeated with the same content it changes nothing.

    A client registers its own samples into the pool that its `client_uuid` names; the admin anywhere. (The
    trainer registers over its link.)
    """

    episode_uuid: EpisodeId
    """The episode's name, unique among all pools."""

    client_uuid: str = Field(default="", max_length=MAX_ID_CHARS)
    """Who registers; also the name of the pool. Empty, the trainer's pool, is for the admin alone."""

    episode_type: EpisodeType = "train"
    """Whether its result may train."""

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
    """The answer to `/register_episode`."""

    success: bool
    """The episode is stored."""

    failure_reason: str = ""
    """Why not; empty on success."""


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
    """Owner of the claim: whoever asked for it."""

    episode_uuid: str = ""
    """The episode."""

    openai_base_url: str = ""
    """Where an OpenAI client finds the model."""

    openai_api_key: str = Field(default="", repr=False)
    """Opens the model for this claim alone, while it holds the lease."""

    attempt: int = 0
    """The number of this claim of the episode, from 1."""

    episode_type: EpisodeType = "train"
    """Whether its result may train."""

    group_id: str = ""
    """The group of episodes that it is compared with."""

    payload: dict[str, JsonValue] = Field(default_factory=dict)
    """What was registered for whoever runs the episode, such as its sample."""

    policy_version: int | None = None
    """Policy version when the episode was claimed."""

    allow_discard_timeout: float = 0.0
    """Seconds without activity after which the claim lapses; `/heartbeat_episode` renews it."""

    max_claim_s: float = 0.0
    """Seconds after which the claim is over, however active it is."""


class ClaimEpisodeResponse(EpisodeClaim):
    """The first episode claimed, or why there is none."""

    success: bool
    """Something was claimed."""

    more: list[EpisodeClaim] = Field(default_factory=list[EpisodeClaim])
    """The other episodes that the same request claimed."""

    fail_cause: str = ""
    """On failure: why nothing could be claimed."""

    retry_after_s: float = 0.0
    """On failure: seconds to wait before asking again."""


class EndEpisodeRequest(Message):
    """`POST /end_episode`. Clients of the first version send no `attempt`."""

    client_uuid: str
    """Owner of the claim."""

    episode_uuid: str
    """The episode."""

    workflow_output: WorkflowOutput
    """The result; repeated it must be the same."""

    attempt: int | None = None
    """Number of the claim; without it the client's only claim of the episode is meant."""


class EndEpisodeResponse(Message):
    """The answer to `/end_episode`."""

    success: bool
    """The result is stored."""

    failure_reason: str = ""
    """Why not; empty on success."""


class AbortEpisodeRequest(Message):
    """`POST /abort_episode`: the owner's attempt failed; the reason is recorded."""

    client_uuid: str
    """Owner of the claim."""

    episode_uuid: str
    """The episode."""

    failure: Failure
    """Why; its `attempt` and `client_uuid` are set by the server."""

    attempt: int | None = None
    """Number of the claim; without it the client's only claim of the episode is meant."""


class CanContinueEpisodeRequest(Message):
    """`POST /can_continue_episode` and `POST /heartbeat_episode`; both renew the lease."""

    client_uuid: str
    """Owner of the claim."""

    episode_uuid: str
    """The episode."""

    attempt: int | None = None
    """Number of the claim. Clients of the first version send none."""


class CanContinueEpisodeResponse(Message):
    """The answer to `/can_continue_episode` and `/heartbeat_episode`."""

    can_continue: bool
    """Whether a result of this claim would still be taken."""

    reason: str = ""
    """Why not; empty while the episode still counts."""

    policy_version_at_claim: int | None = None
    """Policy version when the episode was claimed."""

    policy_version: int | None = None
    """The engine's current policy version."""


class EpisodeCounts(Message):
    """How many episodes are in each state. `accepted` only grows; `failed` shrinks when one is retried."""

    registered: int = 0
    """Waiting for a client."""

    claimed: int = 0
    """Held by a client."""

    ended: int = 0
    """Result stored, not yet acknowledged by the trainer."""

    accepted: int = 0
    """Result acknowledged by the trainer."""

    failed: int = 0
    """Ended without a result, acknowledged or not."""


class EpisodeStatus(Message):
    """One episode as `/get_episode_buffer` and `/failed_episodes` show it. Holds no secret."""

    episode_uuid: str
    """The episode."""

    client_uuid: str = ""
    """Owner of the last claim; empty before the first."""

    episode_status: str
    """`registered`, `claimed`, `ended`, `accepted` or `failed`."""

    openai_base_url: str = ""
    """Of the first version; always empty."""

    openai_api_key: Literal[""] = ""
    """Always empty: a claim's key is told to its owner alone."""

    zmq_listen_result_addr: str = ""
    """Of the first version; always empty."""

    latest_activity_timestamp: float = 0.0
    """Unix time of the claim's last activity; 0 before the first claim."""

    attempt: int = 0
    """Number of the last claim; 0 before the first."""

    episode_type: EpisodeType
    """Whether its result may train."""

    pool: str = TRAINER_POOL
    """Whose episode: empty for the trainer's, else the client that registered it."""

    group_id: str = ""
    """The group of episodes that it is compared with."""

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
    """One page of the episodes that are not over and acknowledged."""

    buffer: list[EpisodeStatus]
    """Episodes that are not over and acknowledged, in the order of registration."""

    next: int | None = None
    """`after` of the next page; None on the last."""


class FailedEpisodesResponse(Message):
    """`GET /failed_episodes`: the dead letters, each with the reason of every attempt."""

    episodes: list[EpisodeStatus]
    """Failed episodes that nobody has dropped, in the order of registration."""

    next: int | None = None
    """`after` of the next page; None on the last."""


class FailedEpisodesRequest(Message):
    """`POST /failed_episodes/retry` and `POST /failed_episodes/drop`."""

    episode_uuids: list[str] = Field(max_length=10_000)
    """The episodes; each is retried or dropped, or refused, on its own."""


class FailedEpisodesReply(Message):
    """What was done for which of the episodes named."""

    success: bool
    """Whether it was done for every episode named."""

    done: list[str]
    """Uuids of the episodes that it was done for."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Uuid -> why not, of the others."""


class EngineStatusResponse(Message):
    """`GET /get_engine_status`."""

    engine_status: EngineStatus
    """What the engine does; episodes are handed out while it is ENGINE.ROLLING."""

    policy_version: int
    """Of the newest published weights; -1 before the first."""

    global_step: int
    """Training steps done."""

    model: str
    """Name of the model; empty before the first trainer."""

    episodes: dict[EpisodeType, EpisodeCounts]
    """How many episodes of each type are in each state, over all pools."""

    pools: dict[str, EpisodeCounts] = Field(default_factory=dict[str, EpisodeCounts])
    """The same for each pool; the trainer's has an empty name."""

    waiting_clients: int = 0
    """Clients in long polls."""

    active_clients: int = 0
    """Clients that hold a claim."""

    trainer_connected: bool
    """A trainer is on the link."""


class StartEngineRequest(Message):
    """`POST /start_engine`: no fields; the config is the one of `/sync_train_config`."""


class UpdateEngineStatusRequest(Message):
    """`POST /update_engine_status`: sets the status while no trainer is connected."""

    engine_status: EngineStatus
    """The status to set."""


class SuccessResponse(Message):
    """The answer to `/abort_episode`, `/start_engine`, `/stop_engine` and `/update_engine_status`."""

    success: bool
    """It was done."""

    failure_reason: str = ""
    """Why not; empty on success."""


class SyncTrainConfigRequest(Message):
    """`POST /sync_train_config`: a config for the engine."""

    yaml_as_string: str
    """The YAML text; unknown keys are refused by name."""


class SyncTrainConfigResponse(Message):
    """The answer to `/sync_train_config`."""

    success: bool
    """The config is kept for the engine."""

    error: str = ""
    """Why not; empty on success."""


class HealthResponse(Message):
    """`GET /health`."""

    status: Literal["ok"] = "ok"
    """The server answers."""

    version: str
    """Of this package."""


class RefusalResponse(Message):
    """The body of every 4xx reply outside the gateway."""

    success: Literal[False] = False
    """Always false."""

    failure_reason: str
    """What was wrong, with the value, and what to do."""


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
