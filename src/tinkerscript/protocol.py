"""The words that clients and the interchange server exchange over HTTP, as pydantic models.

No I/O. Field names of the first version of the protocol keep their names and meanings;
requests and replies may carry more fields than these. Times are seconds.
"""

from __future__ import annotations

from typing import Any, Literal

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


class Message(BaseModel):
    """Base of every message: unknown fields are allowed on the wire and kept out of the model."""

    model_config = ConfigDict(extra="ignore")


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
    """`POST /register_episode` (internal and debugging; the trainer registers over its link)."""

    episode_uuid: str = Field(min_length=1, max_length=200)
    episode_type: EpisodeType = "train"
    group_id: str = ""
    payload: dict[str, JsonValue] = Field(default_factory=dict)
    openai_base_url: str = ""
    openai_api_key: str = ""
    zmq_listen_result_addr: str = ""


class RegisterEpisodeResponse(Message):
    success: bool
    failure_reason: str = ""


class ClaimEpisodeRequest(Message):
    """`POST /claim_episode`."""

    client_uuid: str = Field(min_length=1, max_length=200)
    episode_type: ClaimType = "any"
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
    client_uuid: str
    episode_uuid: str
    attempt: int | None = None


class CanContinueEpisodeResponse(Message):
    can_continue: bool
    reason: str = ""
    """Empty while the episode still counts."""

    policy_version_at_claim: int | None = None
    policy_version: int | None = None


class EpisodeCounts(Message):
    """How many episodes are in each state. `accepted` and `failed` only grow."""

    registered: int = 0
    claimed: int = 0
    ended: int = 0
    """Result stored, not yet acknowledged by the trainer."""

    accepted: int = 0
    failed: int = 0


class EngineStatusResponse(Message):
    engine_status: EngineStatus
    policy_version: int
    global_step: int
    model: str
    episodes: dict[EpisodeType, EpisodeCounts]
    trainer_connected: bool


class UpdateEngineStatusRequest(Message):
    engine_status: EngineStatus


class SuccessResponse(Message):
    """The answer to `POST /abort_episode` and `POST /update_engine_status`; a refusal gives the reason."""

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
