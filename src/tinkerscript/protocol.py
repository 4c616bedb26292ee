"""The messages that clients and the interchange server exchange over HTTP, as pydantic models.

No I/O. Fields of the protocol's first version keep their names and meanings; unknown fields are allowed in
requests and replies. Times are in seconds.
"""

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
    "WorkerReport",
    "WorkflowOutput",
    "bounded",
    "call_id_of",
    "checked_reward",
    "failure_line",
    "json_object",
    "own_clients",
    "total_reward",
    "uuids_of_copies",
]

EpisodeType = Literal["train", "eval"]
"""`train` episodes may be trained on; `eval` episodes are only scored."""

ClaimType = Literal["train", "eval", "any"]

EngineStatus = Literal[
    "ENGINE.OFFLINE",
    "ENGINE.BOOTING",
    "ENGINE.ROLLING",
    "ENGINE.WEIGHT_SYNCING",
    "ENGINE.WEIGHT_EXPORTING",
]

NO_EPISODES = "No available episodes to claim."
"""The `fail_cause` that tells a client of the first version to wait."""

WEIGHT_SYNCING = "Engine is syncing weights"
"""The `fail_cause` of a claim while new weights are being published."""

RUN_FINISHED = "The run is finished."
"""The `fail_cause` of a claim after the trainer has finished its run."""

HANDED_BACK = "worker_stopped"
"""The kind of the failure with which a client that is being stopped gives an episode back. It does not count
against `max_attempts`, nor against the client, unless the episode was handed back very often."""

DEFAULT_ALLOW_DISCARD_TIMEOUT_S = 60.0

MAX_COUNT = 10**12
"""Of what a worker reports of itself."""

SERVER_URL = "TINKERSCRIPT_SERVER_URL"
"""The variable that tells a worker or a client where the server is."""

POLICY = "policy"
"""The name by which every program can request the model being trained."""

TRAINER_POOL = ""
"""The pool of episodes that the trainer registered."""

EpisodeId = Annotated[str, Field(min_length=1, max_length=limits.ID_CHARS)]


class Message(BaseModel):
    """Base of all messages. Unknown fields are allowed on the wire and dropped from the model."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class Failure(Message):
    """Why one attempt at an episode ended without a result."""

    kind: str
    """A stable identifier: `aborted`, `task_error`, `worker_stopped` (`HANDED_BACK`), or what its client
    chose; `lease_expired`, `claim_expired`, `worker_died`, `client_gone`, `client_stopped`, `cancelled`,
    `bad_payload` and `undeliverable` are the server's."""

    message: Annotated[str, AfterValidator(lambda text: text[: limits.REASON_CHARS])] = ""
    """A human-readable description, cut at 4,000 characters."""

    attempt: int = 0
    """The number of the claim; 0 if the episode was not claimed."""

    client_uuid: str = ""
    """Owner of that claim; empty if the episode was not claimed."""


def failure_line(error: BaseException) -> str:
    """The last line of the error's traceback, as a `Failure.message`: `ZeroDivisionError: division by zero`.

    Cut, and without what UTF-8 cannot hold: a failure that cannot be sent would end more than its episode.
    """
    line = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, BaseExceptionGroup):
        line += f"; the first: {failure_line(error.exceptions[0])}"
    return line[: limits.REASON_CHARS].encode(errors="replace").decode()


def _flat_metrics(value: object) -> object:
    """Metrics by name as numbers: a list becomes its mean, an object in an object `outer/inner`."""
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
                yield f"{prefix}{name}", sum(cast("list[float]", items)) / len(items)
        elif value is not None:
            yield f"{prefix}{name}", value


def call_id_of(reply_id: str) -> str:
    """The id of the call that a reply came from, in any of the gateway's formats: `chatcmpl-ID`, `msg_ID`."""
    return _REPLY_PREFIX.sub("", reply_id)


_REPLY_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|resp_)")


def _by_call(value: object) -> object:
    """Rewards by the ids of calls. Raises ValueError for two of one call."""
    if not isinstance(value, dict):
        return {} if value is None else value
    given = cast("dict[str, object]", value)
    found = {call_id_of(str(name)): number for name, number in given.items()}
    if len(found) < len(given):
        raise ValueError("two of the ids are of the same model call; give each call one reward")
    return found


class WorkflowOutput(Message):
    """The result of one episode, as a rollout program returns it."""

    reward: float | list[float] | None = None
    """Higher is better; at most 1e6 in magnitude. A list is summed. `/end_episode` refuses None: an attempt
    without a reward is a failure, see `/abort_episode`."""

    is_success: bool | None = None
    """Whether the attempt solved its sample; null if that does not apply."""

    call_rewards: Annotated[dict[str, float], BeforeValidator(_by_call)] = Field(default_factory=dict)
    """Rewards of single model calls of the policy, by the `id` of its reply: what this call earned, beside
    `reward`. The episode's reward is the sum of all of them and of `reward`, which may be left out then."""

    role_rewards: dict[str, float] = Field(default_factory=dict)
    """The rewards of policies that train beside each other, by the name of their role: what counts for a role
    in place of `reward`, and as `policy` for the policy itself. Each at most 1e6 in magnitude."""

    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything to keep with the result; the whole output may have 1 MiB as JSON."""

    log_metrics: Annotated[dict[str, float], BeforeValidator(_flat_metrics)] = Field(default_factory=dict)
    """Numbers that the trainer averages and logs, at most 1e15 in magnitude. A list of numbers becomes its
    mean, and an object inside of it `outer/inner`."""


class RegisterEpisodeRequest(Message):
    """`POST /register_episode`: register one episode of one sample. Idempotent.

    A client registers its own samples into the pool named by its `client_uuid`; the admin may use any pool.
    (The trainer registers over its link.)
    """

    episode_uuid: EpisodeId
    """The episode's id, unique across all pools."""

    client_uuid: str = Field(default="", max_length=limits.ID_CHARS)
    """Who registers, which is also the name of the pool. Only the admin may leave it empty (the trainer's
    pool)."""

    episode_type: EpisodeType = "train"
    """Whether its result may be trained on."""

    task_id: str = Field(default="", max_length=limits.ID_CHARS)
    """Identifies the sample: episodes with the same `task_id` in a pool form a group."""

    group_id: str = Field(default="", max_length=2 * limits.ID_CHARS)
    """Full name of the group; if empty, it is derived from pool and `task_id`."""

    group_size: int = Field(default=0, ge=0, le=limits.GROUP_SIZE.limit)
    """Total number of episodes in the group; 0 means the trainer's `training.group_size`."""

    copies: int = Field(default=1, ge=1, le=limits.COPIES.limit)
    """Episodes of the sample to register at once, for as many clients: this one, and `EPISODE#2` and so on.
    They form a group, whose size it is unless `group_size` says another."""

    payload: dict[str, JsonValue] = Field(default_factory=dict)
    """Data for the client that claims the episode."""

    openai_base_url: str = ""
    """First version only; ignored, since the server serves the model itself."""

    openai_api_key: str = Field(default="", repr=False)
    """First version only; ignored, since each claim has its own key."""

    zmq_listen_result_addr: str = ""
    """First version only; ignored, since all results use one link."""


def uuids_of_copies(episode_uuid: str, copies: int) -> list[str]:
    """The episode's, and those of its copies."""
    return [episode_uuid, *(f"{episode_uuid}#{number}" for number in range(2, copies + 1))]


def _bounded_in_all(episodes: list[RegisterEpisodeRequest]) -> list[RegisterEpisodeRequest]:
    number, bound = sum(each.copies for each in episodes), limits.REGISTERED
    if number > bound.limit:
        raise ValueError(f"{bound.name}: {number}; a request has at most {bound.limit}: send several")
    return episodes


class RegisterEpisodesRequest(Message):
    """`POST /register_episodes`: register many episodes with one request and one commit. Idempotent."""

    episodes: Annotated[list[RegisterEpisodeRequest], AfterValidator(_bounded_in_all)] = Field(
        max_length=limits.REGISTRATIONS.limit
    )
    """What `/register_episode` takes; each is registered or refused independently."""


class RegisterEpisodesResponse(Message):
    """Reply to `/register_episodes`."""

    success: bool
    """Whether all of them are stored."""

    registered: list[str]
    """Uuids of the episodes that are stored, in order; those of copies included."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Uuid -> reason, for the others."""

    retry_after_s: float = 0.0
    """If some were refused only because a quota is used up: seconds to wait before sending them again."""


class _OfAClaim(Message):
    """Base of the requests of one claim, which its key names (`Authorization: Bearer`)."""

    client_uuid: str = ""
    """Who asks. Not compared: the key alone counts."""

    episode_uuid: str = ""
    """The episode, or the alias under which it was claimed. May be left out; otherwise the key has to be of
    it."""


class IsEpisodeClaimedRequest(Message):
    """`POST /is_episode_claimed`."""

    client_uuid: str = ""
    """Who asks; not compared."""

    episode_uuid: str
    """The episode, or the alias of one of its claims."""


class IsEpisodeClaimedResponse(Message):
    """Reply to `/is_episode_claimed`."""

    success: bool
    """Whether a client holds the episode at this moment; for an alias, whether by that claim."""

    episode_status: str = ""
    """Its state; empty for an episode that this server does not hold."""


class ReplayLatestCallRequest(_OfAClaim):
    """`POST /replay_latest_llm_call`: with the key of a claim, or as the admin of any episode."""


class ReplayLatestCallResponse(Message):
    """Reply to `/replay_latest_llm_call`: the latest recorded call of the episode's last claim."""

    input: dict[str, JsonValue]
    """The `messages` of the whole prompt and the `tools` that were offered."""

    output: dict[str, JsonValue]
    """The model's message."""

    format: Literal["messages"] = "messages"
    """How `input` and `output` are written."""

    call_id: str
    """Id of the recorded call."""

    policy_version: int
    """Version of the weights that sampled it."""

    prompt_token_ids: list[int]
    """Ids of the prompt, as the model saw it."""

    token_ids: list[int]
    """Ids that were sampled."""


class BatchProgressResponse(Message):
    """`GET /get_batch_progress`: what the trainer waits for before its next step."""

    collecting: bool
    """Whether a batch is being filled. False while the trainer boots, trains, or is away."""

    label: str = ""
    """What the batch is for, such as `step 3`."""

    rule: str = ""
    """When it is complete: after enough `groups` or `differing_groups` (`training.batch_rule`)."""

    needed: int = 0
    """How many of them it needs."""

    have: int = 0
    """How many of them it has."""

    episodes_ended: int = 0
    """Episodes of it that have a result or failed."""

    episodes_expected: int = 0
    """Episodes of it so far, with those that still run; for clients' own samples those that ended."""

    groups_ahead: dict[str, int] = Field(default_factory=dict[str, int])
    """Pool -> complete groups that wait for a later batch."""

    max_groups_ahead: int = 0
    """A pool with as many gets no claims of training episodes until a batch takes some; 0: no limit known."""


class ClaimEpisodeRequest(Message):
    """`POST /claim_episode`."""

    client_uuid: EpisodeId
    """Who claims, and so owns the claims in the reply."""

    episode_type: Annotated[ClaimType, BeforeValidator(lambda kind: "any" if kind == "default" else kind)] = (
        "any"
    )
    """Which type of episodes to claim. `default`, as the first version has it, is `any`."""

    pool: str = Field(default=TRAINER_POOL, max_length=limits.ID_CHARS)
    """Whose episodes: empty for the trainer's, or the `client_uuid` of the client that registered them."""

    claim_request_id: str = Field(default="", max_length=limits.ID_CHARS)
    """Unique per request and the same for its retries, which get the same claims and keys. Empty (the first
    version) makes a retry a new request."""

    allow_discard_timeout: float = Field(
        default=DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
        gt=0,
        le=limits.LEASE_S.limit,
        validation_alias=AliasChoices("allow_discard_timeout", "discard_episode_timeout"),
    )
    """Seconds without activity after which the claim's lease expires. Model calls and heartbeats renew it.
    The first version's later clients call it `discard_episode_timeout`."""

    wait_s: float = Field(default=0.0, ge=0, le=limits.WAIT_S.limit)
    """Seconds that the server may hold the request until an episode is available."""

    max_episodes: int = Field(default=1, ge=1, le=limits.EPISODES.limit)
    """Maximum number of episodes to claim; all but the first are in the reply's `more`."""

    sends_key: bool = False
    """Whether the client sends the claim's `openai_api_key` with every request of the claim. For one that
    does not (the first version, on a server without tokens) `episode_uuid` is an alias of the claim, another
    one for each attempt."""


class EpisodeClaim(Message):
    """One claim of one episode."""

    client_uuid: str = ""
    """Owner of the claim: the client that requested it."""

    episode_uuid: str = ""
    """The episode; for a client that sends no key, an alias of this claim."""

    openai_base_url: str = ""
    """Base URL of the model for an OpenAI client."""

    openai_api_key: str = Field(default="", repr=False)
    """Key of this claim alone, valid while it holds the lease: for model calls, and to end, abort and renew
    it."""

    attempt: int = 0
    """Number of this claim of the episode, counted from 1."""

    episode_type: EpisodeType = "train"
    """Whether its result may be trained on."""

    group_id: str = ""
    """The group of episodes it is compared with."""

    payload: dict[str, JsonValue] = Field(default_factory=dict)
    """Registered data for the client that runs the episode, such as its sample."""

    policy_version: int | None = None
    """Policy version when the episode was claimed."""

    allow_discard_timeout: float = 0.0
    """Seconds without activity after which the claim expires; `/heartbeat_episode` renews it."""

    max_claim_s: float = 0.0
    """Seconds after which the claim ends, even if active."""

    max_transcript_bytes: int = 0
    """What `/record_transcript` takes of this claim; 0: nothing."""

    roles: list[str] = Field(default_factory=list[str])
    """The run's roles: further models that requests may name, with the claim's URL and key."""

    run: str = ""
    """Name of the run, for logs."""

    traceparent: str = ""
    """W3C trace context of the claim; empty where the server exports no traces."""


class ClaimEpisodeResponse(EpisodeClaim):
    """Reply to `/claim_episode`: the first claimed episode, or why there is none."""

    success: bool
    """Whether anything was claimed."""

    more: list[EpisodeClaim] = Field(default_factory=list[EpisodeClaim])
    """The other episodes claimed by the same request."""

    fail_cause: str = ""
    """On failure: why nothing could be claimed."""

    retry_after_s: float = 0.0
    """On failure: seconds to wait before asking again."""

    run_finished: bool = False
    """On failure: the run is over, finished or failed, and nothing will be there to claim. A worker can
    end."""


class EndEpisodeRequest(_OfAClaim):
    """`POST /end_episode`: the claim's result."""

    workflow_output: WorkflowOutput
    """The result; a retry must send the same one."""

    task_id: str = Field(default="", max_length=limits.ID_CHARS)
    """The task that the program worked on, if it chose one itself, as AgentJet's clients do. Rewards are
    compared within a group, so all results of a group must name the same task (409 otherwise)."""


class AbortEpisodeRequest(_OfAClaim):
    """`POST /abort_episode`: the attempt failed, with the reason to record."""

    failure: Failure = Failure(kind="aborted")
    """Why; the server sets its `attempt` and `client_uuid`."""


class CanContinueEpisodeRequest(_OfAClaim):
    """`POST /can_continue_episode` and `POST /heartbeat_episode`; both renew the lease."""


class CanContinueEpisodeResponse(Message):
    """Reply to `/can_continue_episode` and `/heartbeat_episode`."""

    can_continue: bool
    """Whether a result of this claim would still be accepted; to `/can_continue_episode`, also whether it
    could train if it came now."""

    reason: str = ""
    """Why not; empty while the claim is valid."""

    stale: bool = False
    """The claim holds its lease, but its calls are too old to train."""

    policy_version_at_claim: int | None = None
    """Policy version when the episode was claimed."""

    policy_version: int | None = None
    """The engine's current policy version."""


class WorkerReport(Message):
    """What a worker process has done since it started, for `/metrics`, which has the sums of all workers."""

    process: str = Field(max_length=limits.ID_CHARS)
    """Unique to the process: its counts begin with 0."""

    concurrency: Annotated[int, Field(ge=0, le=limits.WORKERS_AT_ONCE.limit)] = 0
    """Episodes that it runs at once, at most."""

    running: Annotated[int, Field(ge=0, le=limits.WORKERS_AT_ONCE.limit)] = 0
    """Episodes that it runs now."""

    ended: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Episodes whose result is stored."""

    failed: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Episodes whose rollout raised."""

    lost: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Claims that lost their lease."""

    handed_back: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Episodes that were given back because the worker was stopped."""

    cpu_s: Annotated[float, Field(ge=0, le=MAX_COUNT, allow_inf_nan=False)] = 0.0
    """Processor time, in seconds."""

    resident_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Memory."""


class AwaitRunEndRequest(Message):
    """`POST /await_run_end`."""

    client_uuid: EpisodeId
    """Who asks. A server that is stopped after the run's end waits, for a moment, until it has told all who
    asked lately."""

    wait_s: float = Field(default=0.0, ge=0, le=limits.WAIT_S.limit)
    """Seconds that the server may hold the request until the run is finished."""

    report: WorkerReport | None = None
    """What the client has done."""


class AwaitRunEndResponse(Message):
    """Reply to `/await_run_end`."""

    run_finished: bool
    """Whether the run is over: there will be no more episodes, and results no longer count."""

    fail_cause: str = ""
    """Why it is over, as a claim would say it: `The run is finished.`, or why it failed."""


class EpisodeCounts(Message):
    """Number of episodes in each state. `accepted` only grows; `failed` shrinks when an episode is
    retried."""

    registered: int = 0
    """Waiting for a client."""

    claimed: int = 0
    """Held by a client."""

    ended: int = 0
    """Result stored but not yet used by the trainer."""

    accepted: int = 0
    """Result that the trainer has used, or left out."""

    failed: int = 0
    """Ended without a result, whether acknowledged or not."""


class _ShownEpisode(Message):
    """Base of what shows an episode. Contains no secrets."""

    episode_uuid: str
    """The episode."""

    group_id: str = ""
    """The group of episodes it is compared with."""

    episode_type: EpisodeType
    """Whether its result may be trained on."""

    pool: str = TRAINER_POOL
    """Whose episode: empty for the trainer's, or the client that registered it."""


class EpisodeStatus(_ShownEpisode):
    """One episode as shown by `/get_episode_buffer` and `/failed_episodes`."""

    client_uuid: str = ""
    """Owner of the last claim; empty before the first."""

    episode_status: str
    """`registered`, `claimed`, `ended`, `accepted` or `failed`."""

    openai_base_url: str = ""
    """First version only; always empty."""

    openai_api_key: Literal[""] = ""
    """Always empty: only the owner learns a claim's key."""

    zmq_listen_result_addr: str = ""
    """First version only; always empty."""

    latest_activity_timestamp: float = 0.0
    """Unix time of the claim's last activity; 0 before the first claim."""

    allow_discard_timeout: float = 0.0
    """Seconds without activity after which the last claim expires; 0 before the first."""

    discard_episode_timeout: float = 0.0
    """First version only; the same number."""

    attempt: int = 0
    """Number of the last claim; 0 before the first."""

    policy_version: int | None = None
    """Policy version at the last claim; None before the first."""

    failures: list[Failure] = Field(default_factory=list[Failure])
    """Why each previous attempt ended without a result."""

    acknowledged: bool = False
    """Whether the trainer has used the outcome, or left it out."""


class GetEpisodeBufferRequest(Message):
    """`POST /get_episode_buffer`; an empty object requests the first page."""

    limit: int = Field(default=1000, ge=1, le=10_000)
    """Maximum number of episodes in the reply."""

    after: int = Field(default=0, ge=0)
    """Continue after this number: `next` of the previous page."""


class GetEpisodeBufferResponse(Message):
    """Reply to `/get_episode_buffer`: one page of episodes."""

    buffer: list[EpisodeStatus]
    """Episodes without an acknowledged outcome, in order of registration."""

    next: int | None = None
    """`after` of the next page; None on the last."""


class FailedEpisodesResponse(Message):
    """`GET /failed_episodes`: the dead letters, with the reason of every failed attempt."""

    episodes: list[EpisodeStatus]
    """Failed episodes that were not dropped, in order of registration."""

    next: int | None = None
    """`after` of the next page; None on the last."""


class FailedEpisodesRequest(Message):
    """`POST /failed_episodes/retry` and `POST /failed_episodes/drop`."""

    episode_uuids: list[str] = Field(max_length=10_000)
    """The episodes. Each is processed or refused independently."""


class FailedEpisodesReply(Message):
    """Which of the given episodes were processed."""

    success: bool
    """Whether all episodes were processed."""

    done: list[str]
    """Uuids of the processed episodes."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Uuid -> reason, for the others."""


class _EngineState(Message):
    """Base of what shows the engine and how many episodes there are."""

    engine_status: EngineStatus
    """State of the engine. Episodes are handed out in ENGINE.ROLLING."""

    policy_version: int
    """Version of the newest published weights; -1 before the first."""

    global_step: int
    """Number of completed training steps."""

    trainer_connected: bool
    """Whether a trainer is connected."""

    run_finished: bool = False
    """Whether the trainer has finished its run. Claims are then answered at once, also in long polls."""

    failure: str = ""
    """Why the engine is offline, if its trainer failed: at the start or in the middle of a run."""

    episodes: dict[EpisodeType, EpisodeCounts]
    """Number of episodes in each state by type, over all pools."""


class EngineStatusResponse(_EngineState):
    """`GET /get_engine_status`."""

    model: str
    """Name of the model; empty before the first trainer connects."""

    pools: dict[str, EpisodeCounts] = Field(default_factory=dict[str, EpisodeCounts])
    """The same by pool; the trainer's has an empty name."""

    waiting_clients: int = 0
    """Number of clients in long polls."""

    active_clients: int = 0
    """Number of clients with a claim."""

    quarantined: dict[str, str] = Field(default_factory=dict[str, str])
    """Clients that get no episodes because their attempts only fail while those of others succeed -> why."""


class FleetClaim(_ShownEpisode):
    """A claim that holds its lease."""

    client_uuid: str
    """Who holds it."""

    attempt: int
    """Number of the claim."""

    age_s: float
    """Seconds since it was made."""

    lease_left_s: float
    """Seconds until it expires without further activity. A model call in flight is activity."""

    calls_in_flight: int
    """Model calls that are being answered."""

    policy_version: int
    """Policy version when it was made."""


class FleetClient(Message):
    """A client that holds claims, is in quarantine, or was seen recently."""

    client_uuid: str
    """The client."""

    claims: int
    """How many claims it holds."""

    ended: int = 0
    """Its attempts that ended with a result, since the server started."""

    failed: int = 0
    """Its attempts that failed, among them leases that expired."""

    episodes_per_min: float = 0.0
    """Its attempts a minute since it was first seen, with a result or failed."""

    idle_s: float | None = None
    """Seconds since it asked for an episode or finished one; null: not since the server started."""

    quarantined: str = ""
    """Why it gets no episodes, because its attempts only fail while those of others succeed; or empty."""


class DeadLetter(_ShownEpisode):
    """A dead letter: an episode that used up its attempts, or was cancelled."""

    failures: list[Failure]
    """Why its last attempts (at most 10) ended without a result; messages are cut at 2,000 characters."""

    acknowledged: bool
    """Whether the trainer has closed the group of the failure."""

    can_retry: bool
    """Whether `/failed_episodes/retry` would requeue it."""

    why_not: str = ""
    """Why it cannot be retried; empty if it can."""


class FleetTotals(Message):
    """How many there are of what the lists show a part of."""

    claims: int
    """Claims that hold their lease."""

    clients: int
    """Clients that hold a claim."""

    quarantined: int
    """Clients in quarantine."""

    failed: int
    """Failed episodes that were not dropped."""


class FleetResponse(_EngineState):
    """`GET /fleet`: who works on what, and what went wrong. Contains no secrets."""

    waiting_clients: int
    """Number of clients that wait for an episode and hold none."""

    batch: BatchProgressResponse
    """What the trainer waits for before its next step."""

    claims: list[FleetClaim]
    """At most 500, oldest first."""

    clients: list[FleetClient]
    """At most 500: those in quarantine first, then those with the most claims, then those that came last."""

    failed: list[DeadLetter]
    """At most 100, newest failure first."""

    totals: FleetTotals
    """The length of each list without its limit."""


class StopClientRequest(Message):
    """`POST /stop_client`: give a client no more episodes, and hand out again what it holds."""

    client_uuid: EpisodeId
    """The client; `NAME/` for all programs of a client with its own token."""


class StartEngineRequest(Message):
    """`POST /start_engine`: start a trainer with the config of `/sync_train_config`."""

    force_restart: bool = False
    """Whether to end a trainer that is there first: in order if it ends within 30 s, by force otherwise."""


class UpdateEngineStatusRequest(Message):
    """`POST /update_engine_status`: set the status while no trainer is connected."""

    engine_status: EngineStatus
    """The status to set."""


class SuccessResponse(Message):
    """Reply to requests that something be stored or done."""

    success: bool
    """Whether it was; of a result or an episode: whether it is stored."""

    failure_reason: str = ""
    """Why not; empty on success."""


class SyncTrainConfigRequest(Message):
    """`POST /sync_train_config`: the engine's config."""

    yaml_as_string: str
    """The config as YAML. Unknown keys are refused by name."""


class SyncTrainConfigResponse(Message):
    """Reply to `/sync_train_config`."""

    success: bool
    """Whether the config was accepted."""

    error: str = ""
    """Why not; empty on success."""


class ReadyResponse(Message):
    """`GET /ready`, of the server that serves the run's episodes; others answer 503."""

    status: Literal["ready"] = "ready"
    """Always `ready`."""

    epoch: int
    """Which of the servers that share a database this is: the highest number serves. 0 with SQLite."""


class HealthResponse(Message):
    """`GET /health`."""

    status: Literal["ok"] = "ok"
    """Always `ok`."""

    version: str
    """Version of this package."""


class RefusalResponse(Message):
    """Body of every 4xx reply outside of the gateway."""

    success: Literal[False] = False
    """Always false."""

    failure_reason: str
    """What was wrong, with the value, and the remedy."""


def total_reward(output: WorkflowOutput) -> float | None:
    """The episode's scalar reward: of the whole and of its calls. A list is summed; None if there is none."""
    reward = output.reward
    if reward is None and not output.call_rewards:
        return None
    whole = sum(reward) if isinstance(reward, list) else reward or 0.0
    return float(whole + sum(output.call_rewards.values()))


def own_clients(trainer_id: str) -> str:
    """What the `client_uuid` of each worker that the trainer starts itself begins with."""
    return f"worker-{trainer_id[:8]}-"


def bounded(name: str, value: float, bound: float = MAX_REWARD, setting: str = "") -> float:
    """`value`, if its magnitude is at most `bound`, of a `setting`. Raises ValueError that names them."""
    if not -bound <= value <= bound:  # Also for NaN.
        allowed = f"a finite number from -{bound:g} to {bound:g}{setting}"
        raise ValueError(f"{name}: must be {allowed}, got {value}")
    return value


def checked_reward(output: WorkflowOutput, bound: float = MAX_REWARD) -> float:
    """The episode's scalar reward, at most `bound` in magnitude.

    Raises ValueError that names the field if there is none, or for a reward or metric out of bounds.
    """
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
            f"allows {limits.CALL_REWARDS.limit}: a claim has no more of them"
        )
    for name, value in output.call_rewards.items():
        bounded(f"workflow_output.call_rewards.{name[: limits.ID_CHARS]}", value, bound, setting)
    for name, value in output.role_rewards.items():
        bounded(f"workflow_output.role_rewards.{name}", value, bound, setting)
    for name, value in output.log_metrics.items():
        bounded(f"workflow_output.log_metrics.{name}", value, limits.METRIC.limit)
    return bounded("workflow_output.reward", reward, bound, setting)


def json_object(value: Any) -> dict[str, JsonValue]:
    """Return `value` if it is a JSON object. Raises ValueError naming its type otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value
