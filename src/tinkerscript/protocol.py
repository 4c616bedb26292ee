"""HTTP messages between clients and the interchange server. Times are in seconds."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from tinkerscript import limits
from tinkerscript.errors import MAX_REWARD

__all__ = [
    "DEFAULT_ALLOW_DISCARD_TIMEOUT_S",
    "HANDED_BACK",
    "NO_EPISODES",
    "RUN_FINISHED",
    "TRAINER_POOL",
    "WEIGHT_SYNCING",
    "AbortEpisodeRequest",
    "AwaitRunEndRequest",
    "AwaitRunEndResponse",
    "BatchProgressResponse",
    "CanContinueEpisodeRequest",
    "CanContinueEpisodeResponse",
    "ClaimEpisodeRequest",
    "ClaimEpisodeResponse",
    "ClaimType",
    "DeadLetter",
    "EndEpisodeRequest",
    "EngineStatus",
    "EngineStatusResponse",
    "EpisodeClaim",
    "EpisodeCounts",
    "EpisodeId",
    "EpisodeStatus",
    "EpisodeType",
    "FailedEpisodesReply",
    "FailedEpisodesRequest",
    "FailedEpisodesResponse",
    "Failure",
    "FleetClaim",
    "FleetClient",
    "FleetResponse",
    "FleetTotals",
    "GetEpisodeBufferRequest",
    "GetEpisodeBufferResponse",
    "HealthResponse",
    "IsEpisodeClaimedRequest",
    "IsEpisodeClaimedResponse",
    "Message",
    "ReadyResponse",
    "RefusalResponse",
    "RegisterEpisodeRequest",
    "RegisterEpisodesRequest",
    "RegisterEpisodesResponse",
    "ReplayLatestCallRequest",
    "ReplayLatestCallResponse",
    "StartEngineRequest",
    "StopClientRequest",
    "SuccessResponse",
    "SyncTrainConfigRequest",
    "SyncTrainConfigResponse",
    "UpdateEngineStatusRequest",
    "WorkflowOutput",
    "bounded",
    "call_id_of",
    "checked_reward",
    "failure_line",
    "json_object",
    "own_clients",
    "sendable",
    "total_reward",
    "uuids_of_copies",
]

EpisodeType = Literal["train", "eval"]
"""Results of `eval` episodes are only scored."""

ClaimType = Literal["train", "eval", "any"]

EngineStatus = Literal[
    "ENGINE.OFFLINE",
    "ENGINE.BOOTING",
    "ENGINE.ROLLING",
    "ENGINE.WEIGHT_SYNCING",
    "ENGINE.WEIGHT_EXPORTING",
]

NO_EPISODES = "No available episodes to claim."  # Clients of the first version wait when they read this.
WEIGHT_SYNCING = "Engine is syncing weights"
RUN_FINISHED = "The run is finished."

HANDED_BACK = "worker_stopped"
"""Failure kind of an episode that a stopping client hands back. It usually does not count against
`max_attempts` or the client.
"""

DEFAULT_ALLOW_DISCARD_TIMEOUT_S = 60.0


SERVER_URL = "TINKERSCRIPT_SERVER_URL"

POLICY = "policy"

TRAINER_POOL = ""

EpisodeId = Annotated[str, Field(min_length=1, max_length=limits.ID_CHARS)]


class Message(BaseModel):
    """Unknown fields are dropped."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class Failure(Message):
    """Why an attempt ended without a result."""

    kind: str
    """Stable identifier. Clients send `aborted`, `task_error`, `worker_stopped`, or their own; the server
    adds `lease_expired`, `claim_expired`, `worker_died`, `client_gone`, `client_stopped`, `cancelled`,
    `bad_payload` and `undeliverable`.
    """

    message: Annotated[str, AfterValidator(lambda text: text[: limits.REASON_CHARS])] = ""
    """Description for people, cut at 4,000 characters."""

    attempt: int = 0
    """Number of the claim; 0 without one."""

    client_uuid: str = ""
    """Owner of the claim; empty without one."""


def failure_line(error: BaseException) -> str:
    """Return a line such as `ZeroDivisionError: division by zero`."""
    line = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, BaseExceptionGroup):
        line += f"; the first: {failure_line(error.exceptions[0])}"
    return sendable(line)


def sendable(words: str) -> str:
    """Cut a text for people, and replace lone surrogates, which would end more than an episode."""
    return words[: limits.REASON_CHARS].encode(errors="replace").decode()


def _flat_metrics(value: object) -> object:
    if isinstance(value, list):
        value = {str(number): item for number, item in enumerate(cast("list[object]", value))}
    if not isinstance(value, dict):
        return {} if value is None else value
    flat = dict[str, object]()
    for name, number in _numbers(cast("dict[str, object]", value), "", 0):
        flat[name] = number
        if len(flat) > limits.METRICS.limit:
            raise ValueError(f"a result has at most {limits.METRICS.limit} metrics; report fewer")
        if len(name) > limits.METRIC_NAME.limit:
            raise ValueError(f"a metric's name has at most {limits.METRIC_NAME.limit} characters; shorten it")
    return flat


def _numbers(metrics: dict[str, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    if depth >= limits.METRIC_DEPTH.limit:
        raise ValueError(f"metrics are nested at most {limits.METRIC_DEPTH.limit} deep; flatten them")
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from _numbers(cast("dict[str, object]", value), f"{prefix}{name}/", depth + 1)
        elif isinstance(value, list):
            items = cast("list[object]", value)
            if not all(isinstance(item, int | float) for item in items):
                raise ValueError(f"{prefix}{name}: a list holds something that is not a number")
            if items:
                yield f"{prefix}{name}", _mean(f"{prefix}{name}", cast("list[float]", items))
        elif value is not None:
            yield f"{prefix}{name}", value


def _mean(name: str, numbers: list[float]) -> float:
    try:
        return sum(numbers) / len(numbers)
    except OverflowError as error:  # JSON has integers of any size.
        raise ValueError(f"{name}: the mean of the list is at most {limits.METRIC.limit:g}") from error


def call_id_of(reply_id: str) -> str:
    return _REPLY_PREFIX.sub("", reply_id)


_REPLY_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|resp_)")


def _by_call(value: object) -> object:
    if not isinstance(value, dict):
        return {} if value is None else value
    given = cast("dict[str, object]", value)
    found = {call_id_of(str(name)): number for name, number in given.items()}
    if len(found) < len(given):
        raise ValueError("two of the ids are of the same model call; give each call one reward")
    return found


class WorkflowOutput(Message):
    """Result of an episode, as a program returns it."""

    reward: float | list[float] | None = None
    """At most 1e6 in magnitude. A list is summed. `/end_episode` refuses null: without a reward, abort the
    episode.
    """

    is_success: bool | None = None
    """Whether the attempt solved its sample, if that applies."""

    call_rewards: Annotated[dict[str, float], BeforeValidator(_by_call)] = Field(default_factory=dict)
    """Rewards of single policy calls, by the reply's `id`. They add to `reward`, which is then optional.
    """

    role_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards by role, for policies that train together. A role's entry replaces `reward`, also for `policy`.
    At most 1e6 in magnitude each.
    """

    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything to keep. The whole output may have 1 MiB as JSON."""

    log_metrics: Annotated[dict[str, float], BeforeValidator(_flat_metrics)] = Field(default_factory=dict)
    """Numbers for the trainer to average and log, at most 1e15 in magnitude. A list becomes its mean, and an
    object in an object becomes `outer/inner`.
    """


class RegisterEpisodeRequest(Message):
    """`POST /register_episode`: register an episode of a sample. Idempotent.

    A client registers into the pool named by its `client_uuid`; the admin may use any pool.
    """

    episode_uuid: EpisodeId
    """Unique across all pools."""

    client_uuid: str = Field(default="", max_length=limits.ID_CHARS)
    """Who registers, and the pool's name. Only the admin may leave it empty (the trainer's pool)."""

    episode_type: EpisodeType = "train"
    """Whether the result may train."""

    task_id: str = Field(default="", max_length=limits.ID_CHARS)
    """Identifies the sample. A pool's episodes with the same `task_id` form a group."""

    group_id: str = Field(default="", max_length=2 * limits.ID_CHARS)
    """Full name of the group. Empty: derived from pool and `task_id`."""

    group_size: int = Field(default=0, ge=0, le=limits.GROUP_SIZE.limit)
    """Episodes in the group. 0: the trainer's `training.group_size`."""

    copies: int = Field(default=1, ge=1, le=limits.COPIES.limit)
    """Episodes to register: this one, then `EPISODE#2` and so on. They form a group unless `group_size` is
    set.
    """

    payload: dict[str, JsonValue] = Field(default_factory=dict)
    """Data for the claiming client, such as the sample."""

    openai_base_url: str = ""
    """First version only; ignored."""

    openai_api_key: str = Field(default="", repr=False)
    """First version only; ignored."""

    zmq_listen_result_addr: str = ""
    """First version only; ignored."""


def uuids_of_copies(episode_uuid: str, copies: int) -> list[str]:
    return [episode_uuid, *(f"{episode_uuid}#{number}" for number in range(2, copies + 1))]


def _bounded_in_all(episodes: list[RegisterEpisodeRequest]) -> list[RegisterEpisodeRequest]:
    number, bound = sum(each.copies for each in episodes), limits.REGISTERED
    if number > bound.limit:
        raise ValueError(f"{bound.name}: {number}; a request has at most {bound.limit}: send several")
    return episodes


class RegisterEpisodesRequest(Message):
    """`POST /register_episodes`: register many episodes. Idempotent."""

    episodes: Annotated[list[RegisterEpisodeRequest], AfterValidator(_bounded_in_all)] = Field(
        max_length=limits.REGISTRATIONS.limit
    )
    """Each is registered or refused independently."""


class RegisterEpisodesResponse(Message):
    """Reply to `/register_episodes`."""

    success: bool
    """Whether all episodes are stored."""

    registered: list[str]
    """Uuids of the stored episodes in order, including copies."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Uuid -> reason, for the others."""

    retry_after_s: float = 0.0
    """Seconds to wait before sending the refused episodes again; 0 unless only a quota is the reason."""


class _OfAClaim(Message):
    """The key in `Authorization: Bearer` names the claim."""

    client_uuid: str = ""
    """Who asks. Not checked: only the key counts."""

    episode_uuid: str = ""
    """The episode, or the alias of its claim. If given, it must be the key's."""


class IsEpisodeClaimedRequest(Message):
    """`POST /is_episode_claimed`."""

    client_uuid: str = ""
    """Who asks. Not checked."""

    episode_uuid: str
    """The episode, or the alias of a claim."""


class IsEpisodeClaimedResponse(Message):
    """Reply to `/is_episode_claimed`."""

    success: bool
    """Whether a client holds the episode now; for an alias, whether that claim does."""

    episode_status: str = ""
    """The episode's state; empty if unknown."""


class ReplayLatestCallRequest(_OfAClaim):
    """`POST /replay_latest_llm_call`, with a claim's key, or as admin for any episode."""


class ReplayLatestCallResponse(Message):
    """The latest recorded call of the episode's last claim."""

    input: dict[str, JsonValue]
    """The whole prompt as `messages`, and the `tools` offered."""

    output: dict[str, JsonValue]
    """The model's message."""

    format: Literal["messages"] = "messages"
    """Format of `input` and `output`."""

    call_id: str
    """Id of the call."""

    policy_version: int
    """Version of the weights that sampled it."""

    prompt_token_ids: list[int]
    """Token ids of the prompt."""

    token_ids: list[int]
    """Sampled token ids."""


class BatchProgressResponse(Message):
    """`GET /get_batch_progress`: the trainer's wait for its next step."""

    collecting: bool
    """False while the trainer boots, trains, or is away."""

    label: str = ""
    """The batch's purpose, such as `step 3`."""

    rule: str = ""
    """What completes the batch: `groups` or `differing_groups` (`training.batch_rule`)."""

    needed: int = 0
    """Groups that the batch needs."""

    have: int = 0
    """Groups that the batch has."""

    episodes_ended: int = 0
    """The batch's episodes with a result or failure."""

    episodes_expected: int = 0
    """The batch's ended and running episodes, without running ones of clients' own samples."""

    groups_ahead: dict[str, int] = Field(default_factory=dict[str, int])
    """Pool -> complete groups waiting for a later batch."""

    max_groups_ahead: int = 0
    """A pool with this many gets no training claims until a batch takes some. 0: unknown."""


class ClaimEpisodeRequest(Message):
    """`POST /claim_episode`."""

    client_uuid: EpisodeId
    """Who claims, and owns the claims in the reply."""

    episode_type: Annotated[ClaimType, BeforeValidator(lambda kind: "any" if kind == "default" else kind)] = (
        "any"
    )
    """Type of episodes to claim. `default`, the first version's word, means `any`."""

    pool: str = Field(default=TRAINER_POOL, max_length=limits.ID_CHARS)
    """The `client_uuid` that registered the episodes. Empty: the trainer's pool."""

    claim_request_id: str = Field(default="", max_length=limits.ID_CHARS)
    """Unique per request. A retry repeats it and gets the same claims and keys. Empty: retries are new
    requests.
    """

    allow_discard_timeout: float = Field(
        default=DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
        gt=0,
        le=limits.LEASE_S.limit,
        validation_alias=AliasChoices("allow_discard_timeout", "discard_episode_timeout"),
    )
    """Seconds without activity after which the lease expires. Model calls and heartbeats renew it. Some
    clients of the first version send `discard_episode_timeout`.
    """

    wait_s: float = Field(default=0.0, ge=0, le=limits.WAIT_S.limit)
    """Seconds that the server may wait for an episode."""

    max_episodes: int = Field(default=1, ge=1, le=limits.EPISODES.limit)
    """Maximum number of episodes."""

    sends_key: bool = False
    """Whether the client sends the claim's `openai_api_key` with its requests. Otherwise (first version,
    server without tokens) a new alias as `episode_uuid` identifies the claim.
    """


class EpisodeClaim(Message):
    """A claim of an episode."""

    client_uuid: str = ""
    """Owner of the claim."""

    episode_uuid: str = ""
    """The episode, or for clients that send no key, an alias of this claim."""

    openai_base_url: str = ""
    """Base URL of the model for an OpenAI client."""

    openai_api_key: str = Field(default="", repr=False)
    """Key for model calls and requests about the claim, while it holds the lease."""

    attempt: int = 0
    """Number of this claim of the episode, from 1."""

    episode_type: EpisodeType = "train"
    """Whether the result may train."""

    group_id: str = ""
    """The group within which rewards are compared."""

    payload: dict[str, JsonValue] = Field(default_factory=dict)
    """Registered data, such as the sample."""

    policy_version: int | None = None
    """Policy version at the claim."""

    allow_discard_timeout: float = 0.0
    """Seconds without activity after which the claim expires; `/heartbeat_episode` renews it."""

    max_claim_s: float = 0.0
    """Seconds after which the claim ends, even if active."""

    max_transcript_bytes: int = 0
    """Maximum size for `/record_transcript`. 0: not recorded."""

    roles: list[str] = Field(default_factory=list[str])
    """Other models that requests may name."""

    run: str = ""
    """Name of the run, for logs."""


class ClaimEpisodeResponse(EpisodeClaim):
    """The first claimed episode, or why nothing was claimed."""

    success: bool
    """Whether anything was claimed."""

    more: list[EpisodeClaim] = Field(default_factory=list[EpisodeClaim])
    """The request's other claims."""

    fail_cause: str = ""
    """Why nothing was claimed."""

    retry_after_s: float = 0.0
    """Seconds to wait before asking again, if nothing was claimed."""

    run_finished: bool = False
    """Whether the run has finished or failed."""


class EndEpisodeRequest(_OfAClaim):
    """`POST /end_episode`: the claim's result."""

    workflow_output: WorkflowOutput
    """A retry must send the same output."""

    task_id: str = Field(default="", max_length=limits.ID_CHARS)
    """The task, if the program chose it, as AgentJet's clients do. A group's results must agree on it, or get
    a 409.
    """


class AbortEpisodeRequest(_OfAClaim):
    """`POST /abort_episode`: the attempt failed."""

    failure: Failure = Failure(kind="aborted")
    """The reason to record. The server sets its `attempt` and `client_uuid`."""


class CanContinueEpisodeRequest(_OfAClaim):
    """`POST /can_continue_episode` and `POST /heartbeat_episode`. Both renew the lease."""


class CanContinueEpisodeResponse(Message):
    """Reply to `/can_continue_episode` and `/heartbeat_episode`."""

    can_continue: bool
    """Whether the server would accept a result now, and for `/can_continue_episode`, could still train on it.
    """

    reason: str = ""
    """Why not."""

    stale: bool = False
    """Whether the claim holds its lease, but its calls are too old to train."""

    policy_version_at_claim: int | None = None
    """Policy version at the claim."""

    policy_version: int | None = None
    """Current policy version."""


class AwaitRunEndRequest(Message):
    """`POST /await_run_end`."""

    client_uuid: EpisodeId
    """Who asks. A stopping server waits briefly for recent callers to get the answer."""

    wait_s: float = Field(default=0.0, ge=0, le=limits.WAIT_S.limit)
    """Seconds that the server may wait for the run's end."""


class AwaitRunEndResponse(Message):
    """Reply to `/await_run_end`."""

    run_finished: bool
    """Whether the run is over, and results no longer count."""

    fail_cause: str = ""
    """Why: `The run is finished.`, or the reason for its failure."""


class EpisodeCounts(Message):
    """Episodes by state. `accepted` only grows; retries shrink `failed`."""

    registered: int = 0
    """Waiting for a client."""

    claimed: int = 0
    """Held by a client."""

    ended: int = 0
    """With a result that the trainer has not used."""

    accepted: int = 0
    """With a result that the trainer has used or left out."""

    failed: int = 0
    """Ended without a result."""


class _ShownEpisode(Message):
    episode_uuid: str
    """Uuid of the episode."""

    group_id: str = ""
    """The group within which rewards are compared."""

    episode_type: EpisodeType
    """Whether the result may train."""

    pool: str = TRAINER_POOL
    """The client that registered it; empty for the trainer."""


class EpisodeStatus(_ShownEpisode):
    """An episode as shown by `/get_episode_buffer` and `/failed_episodes`."""

    client_uuid: str = ""
    """Owner of the last claim; empty before the first."""

    episode_status: str
    """`registered`, `claimed`, `ended`, `accepted` or `failed`."""

    openai_base_url: str = ""
    """Always empty (first version)."""

    openai_api_key: Literal[""] = ""
    """Always empty: only the owner learns a claim's key."""

    zmq_listen_result_addr: str = ""
    """Always empty (first version)."""

    latest_activity_timestamp: float = 0.0
    """Unix time of the last activity, or 0."""

    allow_discard_timeout: float = 0.0
    """Lease of the last claim in seconds."""

    discard_episode_timeout: float = 0.0
    """First version's name of the same number."""

    attempt: int = 0
    """Number of the last claim; 0 before the first."""

    policy_version: int | None = None
    """Policy version at the last claim; null before the first."""

    failures: list[Failure] = Field(default_factory=list[Failure])
    """Why earlier attempts ended without a result."""

    acknowledged: bool = False
    """Whether the trainer has used the outcome or left it out."""


class GetEpisodeBufferRequest(Message):
    """`POST /get_episode_buffer`. An empty object requests the first page."""

    limit: int = Field(default=1000, ge=1, le=10_000)
    """Maximum number of episodes in the reply."""

    after: int = Field(default=0, ge=0)
    """The previous page's `next`; 0 for the first page."""


class GetEpisodeBufferResponse(Message):
    """A page of episodes."""

    buffer: list[EpisodeStatus]
    """Episodes that the trainer has not used, in order of registration."""

    next: int | None = None
    """`after` for the next page; null on the last."""


class FailedEpisodesResponse(Message):
    """`GET /failed_episodes`: the dead letters, with each failed attempt."""

    episodes: list[EpisodeStatus]
    """Failed episodes that were not dropped, in order of registration."""

    next: int | None = None
    """`after` for the next page; null on the last."""


class FailedEpisodesRequest(Message):
    """`POST /failed_episodes/retry` and `POST /failed_episodes/drop`."""

    episode_uuids: list[str] = Field(max_length=10_000)
    """Each is processed or refused independently."""


class FailedEpisodesReply(Message):
    """Reply to the requests about failed episodes."""

    success: bool
    """Whether all episodes were processed."""

    done: list[str]
    """Uuids of the processed episodes."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Uuid -> reason, for the others."""


class _EngineState(Message):
    engine_status: EngineStatus
    """Episodes are handed out in ENGINE.ROLLING."""

    policy_version: int
    """Version of the newest published weights; -1 before the first."""

    global_step: int
    """Completed training steps."""

    trainer_connected: bool
    """Whether a trainer is connected."""

    run_finished: bool = False
    """Whether the run has finished. Claims are then answered at once."""

    failure: str = ""
    """Why the trainer failed."""

    episodes: dict[EpisodeType, EpisodeCounts]
    """Episodes by type and state, over all pools."""


class EngineStatusResponse(_EngineState):
    """`GET /get_engine_status`."""

    model: str
    """Name of the model; empty before the first trainer connects."""

    pools: dict[str, EpisodeCounts] = Field(default_factory=dict[str, EpisodeCounts])
    """Episodes by pool (empty: the trainer's) and state."""

    waiting_clients: int = 0
    """Clients waiting in a claim request."""

    active_clients: int = 0
    """Clients with a claim."""

    quarantined: dict[str, str] = Field(default_factory=dict[str, str])
    """Client -> why it gets no episodes."""


class FleetClaim(_ShownEpisode):
    """A claim that holds its lease."""

    client_uuid: str
    """Owner of the claim."""

    attempt: int
    """Number of the claim."""

    age_s: float
    """Seconds since the claim was made."""

    lease_left_s: float
    """Seconds until it expires without activity, such as a running call."""

    calls_in_flight: int
    """Model calls being answered."""

    policy_version: int
    """Policy version at the claim."""


class FleetClient(Message):
    """A client that holds claims, is in quarantine, or was seen recently."""

    client_uuid: str
    """Name of the client."""

    claims: int
    """Claims that it holds."""

    ended: int = 0
    """Attempts with a result since the server started."""

    failed: int = 0
    """Failed attempts since then, including expired leases."""

    episodes_per_min: float = 0.0
    """Attempts that ended per minute."""

    idle_s: float | None = None
    """Seconds since it last claimed or finished an episode; null: not yet."""

    quarantined: str = ""
    """Why it gets no episodes: its attempts only fail, while other clients' succeed."""


class DeadLetter(_ShownEpisode):
    """An episode that used up its attempts, or was cancelled."""

    failures: list[Failure]
    """Why its last attempts (at most 10) failed, with messages cut at 2,000 characters."""

    acknowledged: bool
    """Whether the trainer has closed the episode's group."""

    can_retry: bool
    """Whether `/failed_episodes/retry` would requeue it."""

    why_not: str = ""
    """Why it cannot be retried."""


class FleetTotals(Message):
    """Full lengths of the lists in `/fleet`."""

    claims: int
    """Claims that hold their lease."""

    clients: int
    """Clients that hold a claim."""

    quarantined: int
    """Clients in quarantine."""

    failed: int
    """Failed episodes that were not dropped."""


class FleetResponse(_EngineState):
    """`GET /fleet`: who works on what, and what went wrong."""

    waiting_clients: int
    """Clients that wait for an episode and hold none."""

    batch: BatchProgressResponse
    """The trainer's wait for its next step."""

    claims: list[FleetClaim]
    """At most 500, oldest first."""

    clients: list[FleetClient]
    """At most 500: first the quarantined, then by number of claims, then the most recently seen."""

    failed: list[DeadLetter]
    """At most 100, newest failure first."""

    totals: FleetTotals
    """Full lengths of the lists."""


class StopClientRequest(Message):
    """`POST /stop_client`: give a client no more episodes, and requeue its own."""

    client_uuid: EpisodeId
    """The client; `NAME/` means all programs with this token."""


class StartEngineRequest(Message):
    """`POST /start_engine`: start a trainer with the config of `/sync_train_config`."""

    force_restart: bool = False
    """Whether to stop a running trainer first. It is killed after 30 s."""


class UpdateEngineStatusRequest(Message):
    """`POST /update_engine_status`: set the status while no trainer is connected."""

    engine_status: EngineStatus
    """Status to set."""


class SuccessResponse(Message):
    """Reply to other requests."""

    success: bool
    """Whether the request was carried out."""

    failure_reason: str = ""
    """Why not."""


class SyncTrainConfigRequest(Message):
    """`POST /sync_train_config`: the engine's config."""

    yaml_as_string: str
    """The config as YAML. Unknown keys are refused."""


class SyncTrainConfigResponse(Message):
    """Reply to `/sync_train_config`."""

    success: bool
    """Whether the config was accepted."""

    error: str = ""
    """Why not."""


class ReadyResponse(Message):
    """`GET /ready`: 200 from the server that serves the run's episodes, 503 from others."""

    status: Literal["ready"] = "ready"
    """Always `ready`."""

    epoch: int
    """Among servers that share a database, the highest serves. 0 with SQLite."""


class HealthResponse(Message):
    """`GET /health`."""

    status: Literal["ok"] = "ok"
    """Always `ok`."""

    version: str
    """Version of this package."""


class RefusalResponse(Message):
    """Body of every 4xx reply outside the gateway."""

    success: Literal[False] = False
    """Always false."""

    failure_reason: str
    """What was wrong, and the remedy."""


def total_reward(output: WorkflowOutput) -> float | None:
    reward = output.reward
    if reward is None and not output.call_rewards:
        return None
    whole = sum(reward) if isinstance(reward, list) else reward or 0.0
    return float(whole + sum(output.call_rewards.values()))


def own_clients(trainer_id: str) -> str:
    """Return the `client_uuid` prefix of this trainer's own workers."""
    return f"worker-{trainer_id[:8]}-"


def bounded(name: str, value: float, bound: float = MAX_REWARD, setting: str = "") -> float:
    """Raise ValueError if a magnitude exceeds `bound` (a `setting`)."""
    if not -bound <= value <= bound:  # NaN is refused too.
        allowed = f"a finite number from -{bound:g} to {bound:g}{setting}"
        raise ValueError(f"{name}: must be {allowed}, got {value}")
    return value


def checked_reward(output: WorkflowOutput, bound: float = MAX_REWARD) -> float:
    """Return the episode's reward. Raises ValueError without one, or for a reward or metric out of bounds."""
    reward = total_reward(output)
    if reward is None:
        raise ValueError(
            "workflow_output.reward: a result needs a reward; report an attempt without one as a failure "
            "with its reason (POST /abort_episode)"
        )
    setting = f" ({limits.SECTION}.max_reward)"
    if output.call_rewards and POLICY in output.role_rewards:
        raise ValueError(
            "workflow_output.role_rewards: the reward of 'policy' replaces the episode's, which call_rewards "
            "are a part of; give one of them"
        )
    if len(output.call_rewards) > limits.CALL_REWARDS.limit:
        raise ValueError(
            f"workflow_output.call_rewards: {len(output.call_rewards)} calls; {limits.CALL_REWARDS.name} "
            f"allows {limits.CALL_REWARDS.limit}: a claim cannot have more calls"
        )
    for name, value in output.call_rewards.items():
        bounded(f"workflow_output.call_rewards.{name[: limits.ID_CHARS]}", value, bound, setting)
    for name, value in output.role_rewards.items():
        bounded(f"workflow_output.role_rewards.{name}", value, bound, setting)
    for name, value in output.log_metrics.items():
        bounded(f"workflow_output.log_metrics.{name}", value, limits.METRIC.limit)
    return bounded("workflow_output.reward", reward, bound, setting)


def json_object(value: Any) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value
