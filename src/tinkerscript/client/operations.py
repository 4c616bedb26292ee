"""The client's requests to the interchange server, one `Operation` per method, without I/O.

Operations may be repeated. A claim keeps its `claim_request_id` until it has a definite answer, so a retry
returns the claim of the lost reply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import UUID, uuid4, uuid5

from pydantic import JsonValue

from tinkerscript.client.episode import BEATS_PER_LEASE, Episode
from tinkerscript.client.exchange import (
    CLAIM_PATH,
    REPLY_TIMEOUT_S,
    HttpRequest,
    Operation,
    Timing,
    Wait,
    post,
    read,
    respond,
)
from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import (
    NoEpisodeError,
    RequestRefusedError,
    RunFailedError,
    RunFinishedError,
    ServerUnreachableError,
)
from tinkerscript.limits import ID_CHARS
from tinkerscript.protocol import (
    HANDED_BACK,
    NO_EPISODES,
    RUN_FINISHED,
    TRAINER_POOL,
    WEIGHT_SYNCING,
    AbortEpisodeRequest,
    AwaitRunEndRequest,
    AwaitRunEndResponse,
    BatchProgressResponse,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimType,
    EndEpisodeRequest,
    EngineStatusResponse,
    EpisodeClaim,
    EpisodeStatus,
    EpisodeType,
    FailedEpisodesReply,
    FailedEpisodesRequest,
    FailedEpisodesResponse,
    Failure,
    IsEpisodeClaimedRequest,
    IsEpisodeClaimedResponse,
    RegisterEpisodeRequest,
    RegisterEpisodesRequest,
    RegisterEpisodesResponse,
    ReplayLatestCallRequest,
    ReplayLatestCallResponse,
    StartEngineRequest,
    SuccessResponse,
    SyncTrainConfigRequest,
    WorkflowOutput,
    call_id_of,
    checked_reward,
    failure_line,
)

LONG_POLL_S = 30.0  # The server may hold a request for an episode this long.

LAST_REQUEST_S = 5.0  # For an episode's last request while its program is being stopped.
TASK_ERROR = "task_error"

ENGINE_S = 60.0  # For a trainer to end before another one starts.
_PER_REGISTRATION = 500

NO_RESULT = "the block of the episode ended without a result"

NAMESPACE = UUID("8e2c4d0e-6f0b-5c53-9d0a-0f5f1f1a7c11")

_HEARTBEAT_LOST = frozenset({401, 409, 410})


T = TypeVar("T")


@dataclass(frozen=True)
class Operations:
    settings: ClientSettings
    timing: Timing = field(default_factory=Timing)

    def begin_episodes(
        self,
        max_episodes: int,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
    ) -> Operation[list[EpisodeClaim]]:
        """Raises NoEpisodeError after `wait_s`, and RunFinishedError if there will be no episode."""
        if wait_s is not None and not wait_s >= 0:
            raise ValueError(f"wait_s must be a number of seconds or None, got {wait_s!r}")
        started, empty, left_s = self.timing.clock(), 0, wait_s
        while True:
            request = self._begin_request(max_episodes, episode_type, pool, left_s)
            reply = yield from self._ask(request, ClaimEpisodeResponse.model_validate_json)
            if reply.success:
                return [reply, *reply.more]
            if reply.run_finished:
                raise _run_end_error(reply.fail_cause)
            _check_worth_waiting(reply)
            delay_s = self.timing.delay(empty, reply.retry_after_s or None)
            empty += 1
            if wait_s is not None:
                left_s = wait_s - (self.timing.clock() - started)
                if left_s <= 0:
                    raise NoEpisodeError(_no_episode(episode_type, pool, wait_s, reply.fail_cause))
                delay_s = min(delay_s, left_s)
                left_s = max(0.0, left_s - delay_s)
            yield Wait(delay_s)

    def register_episode(
        self,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType,
        round: str,
    ) -> Operation[list[str]]:
        """Raises ValueError for an empty or long task id, or a group size below 1."""
        group = self._group(task_id, payload, group_size=group_size, episode_type=episode_type, round=round)
        for message in group:
            yield from self._ask(post("/register_episode", message), _read_success)
        return [message.episode_uuid for message in group]

    def register_episodes(
        self,
        samples: Mapping[str, Mapping[str, JsonValue]],
        *,
        group_size: int,
        episode_type: EpisodeType,
        round: str,
    ) -> Operation[dict[str, list[str]]]:
        """Waits while a quota is used up. An error names the refused episodes."""
        groups = {
            task_id: self._group(
                task_id, payload, group_size=group_size, episode_type=episode_type, round=round
            )
            for task_id, payload in samples.items()
        }
        left = [message for group in groups.values() for message in group]
        waiting_since: float | None = None
        while left:
            request = post("/register_episodes", RegisterEpisodesRequest(episodes=left[:_PER_REGISTRATION]))
            reply = yield from self._ask(request, RegisterEpisodesResponse.model_validate_json)
            if reply.refused and not reply.retry_after_s:
                raise RequestRefusedError(200, "; ".join(f"{k}: {v}" for k, v in reply.refused.items()))
            done = set(reply.registered)
            left = [message for message in left if message.episode_uuid not in done]
            now = self.timing.clock()
            waiting_since = now if done or waiting_since is None else waiting_since
            limit_s = self.settings.timeout_s
            if reply.refused and limit_s is not None and now - waiting_since > limit_s:
                raise ServerUnreachableError(
                    f"{len(left)} episodes are not registered after {limit_s:g} s (timeout_s): "
                    f"{next(iter(reply.refused.values()))}"
                )
            if reply.refused:
                yield Wait(self.timing.delay(0, reply.retry_after_s))
        return {task: [message.episode_uuid for message in group] for task, group in groups.items()}

    def _group(
        self,
        task_id: str,
        payload: Mapping[str, JsonValue],
        *,
        group_size: int,
        episode_type: EpisodeType,
        round: str,
    ) -> list[RegisterEpisodeRequest]:
        named = f"{task_id}#{round}" if round else task_id
        if not task_id or len(named) > ID_CHARS:
            raise ValueError(f"task_id (with its round) must have 1 to {ID_CHARS} characters, got {named!r}")
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        return [
            RegisterEpisodeRequest(
                episode_uuid=uuid,
                client_uuid=self.settings.client_uuid,
                episode_type=episode_type,
                task_id=named,
                group_size=group_size,
                payload=dict(payload),
            )
            for uuid in episode_uuids(self.settings.client_uuid, task_id, group_size, round)
        ]

    def end_episode(
        self,
        episode: Episode,
        reward: float | list[float] | WorkflowOutput | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        is_success: bool | None = None,
        metadata: dict[str, JsonValue] | None = None,
        log_metrics: dict[str, float] | None = None,
        role_rewards: dict[str, float] | None = None,
    ) -> Operation[None]:
        output = workflow_output(
            reward,
            is_success=is_success,
            metadata=metadata,
            log_metrics=log_metrics,
            role_rewards=role_rewards,
            call_rewards=_added(episode.call_rewards, rewards or {}),
        )
        message = EndEpisodeRequest(
            client_uuid=episode.client_uuid,
            episode_uuid=episode.episode_uuid,
            workflow_output=output,
        )
        checked_reward(output)
        yield from self._settle(episode, post("/end_episode", message, key=episode.openai_api_key))

    def abort_episode(
        self, episode: Episode, reason: str, kind: str, *, within_s: float | None = None
    ) -> Operation[None]:
        message = AbortEpisodeRequest(
            client_uuid=episode.client_uuid,
            episode_uuid=episode.episode_uuid,
            failure=Failure(kind=kind, message=reason, attempt=episode.attempt),
        )
        request = post("/abort_episode", message, key=episode.openai_api_key)
        yield from self._settle(episode, request, within_s)

    def give_back(self, episode: Episode, error: BaseException) -> Operation[None]:
        """Abort the episode of a program that raised `error`. An interruption does not count as a failure."""
        if isinstance(error, Exception | SystemExit):
            within_s = LAST_REQUEST_S if isinstance(error, SystemExit) else None
            return self.abort_episode(episode, failure_line(error), TASK_ERROR, within_s=within_s)
        return self.abort_episode(episode, failure_line(error), HANDED_BACK, within_s=LAST_REQUEST_S)

    def can_continue_episode(self, episode: Episode) -> Operation[CanContinueEpisodeResponse]:
        request = _claim_request("/can_continue_episode", episode)
        reply = yield from self._ask(request, CanContinueEpisodeResponse.model_validate_json)
        return _mark_lost(episode, reply)

    def heartbeat_episode(self, episode: Episode) -> Operation[CanContinueEpisodeResponse]:
        """A lost claim is a normal answer here, not an error."""
        # During an outage, requests are sent at least as often as the lease requires.
        response = yield from respond(
            _claim_request("/heartbeat_episode", episode),
            timeout_s=self.settings.timeout_s,
            timing=self.timing,
            max_delay_s=episode.allow_discard_timeout / BEATS_PER_LEASE,
        )
        if response.status in _HEARTBEAT_LOST:
            return _mark_lost(episode, CanContinueEpisodeResponse(can_continue=False, reason=response.reason))
        return _mark_lost(episode, read(response, CanContinueEpisodeResponse.model_validate_json))

    def is_episode_claimed(self, episode_uuid: str) -> Operation[bool]:
        request = post("/is_episode_claimed", IsEpisodeClaimedRequest(episode_uuid=episode_uuid))
        reply = yield from self._ask(request, IsEpisodeClaimedResponse.model_validate_json)
        return reply.success

    def replay_latest_llm_call(self, episode: Episode) -> Operation[ReplayLatestCallResponse]:
        message = ReplayLatestCallRequest(episode_uuid=episode.episode_uuid)
        request = post("/replay_latest_llm_call", message, key=episode.openai_api_key)
        return self._ask(request, ReplayLatestCallResponse.model_validate_json)

    def get_batch_progress(self) -> Operation[BatchProgressResponse]:
        request = HttpRequest("GET", "/get_batch_progress", None, REPLY_TIMEOUT_S)
        return self._ask(request, BatchProgressResponse.model_validate_json)

    def sync_train_config(self, yaml_as_string: str) -> Operation[None]:
        message = SyncTrainConfigRequest(yaml_as_string=yaml_as_string)
        return self._ask(post("/sync_train_config", message), _read_success)

    def start_engine(self, *, force_restart: bool) -> Operation[None]:
        message = StartEngineRequest(force_restart=force_restart)
        return self._ask(post("/start_engine", message, hold_s=ENGINE_S), _read_success)

    def stop_engine(self) -> Operation[None]:
        return self._ask(HttpRequest("POST", "/stop_engine", b"{}", REPLY_TIMEOUT_S), _read_success)

    def failed_episodes(self) -> Operation[list[EpisodeStatus]]:
        found, after = list[EpisodeStatus](), 0
        while after is not None:
            request = HttpRequest("GET", f"/failed_episodes?after={after}", None, REPLY_TIMEOUT_S)
            page = yield from self._ask(request, FailedEpisodesResponse.model_validate_json)
            found += page.episodes
            after = page.next
        return found

    def each_failed_episode(
        self, action: str, episode_uuids: Sequence[str]
    ) -> Operation[FailedEpisodesReply]:
        message = FailedEpisodesRequest(episode_uuids=list(episode_uuids))
        return self._ask(post(f"/failed_episodes/{action}", message), FailedEpisodesReply.model_validate_json)

    def get_engine_status(self) -> Operation[EngineStatusResponse]:
        request = HttpRequest("GET", "/get_engine_status", None, REPLY_TIMEOUT_S)
        return self._ask(request, EngineStatusResponse.model_validate_json)

    def await_run_end(self, wait_s: float | None) -> Operation[bool]:
        started, asked = self.timing.clock(), 0
        while True:
            left_s = math.inf if wait_s is None else max(0.0, wait_s - (self.timing.clock() - started))
            hold_s = min(LONG_POLL_S, left_s)
            message = AwaitRunEndRequest(client_uuid=self.settings.client_uuid, wait_s=hold_s)
            sent_at = self.timing.clock()
            request = post("/await_run_end", message, hold_s=hold_s)
            reply = yield from self._ask(request, AwaitRunEndResponse.model_validate_json)
            if reply.run_finished and reply.fail_cause not in ("", RUN_FINISHED):
                raise _run_end_error(reply.fail_cause)
            if reply.run_finished or left_s <= hold_s:
                return reply.run_finished
            # The server answers early when it is shutting down.
            asked = 0 if self.timing.clock() - sent_at >= hold_s / 2 else asked + 1
            if asked:
                yield Wait(self.timing.delay(asked))

    def _begin_request(
        self, max_episodes: int, episode_type: ClaimType, pool: str, left_s: float | None
    ) -> HttpRequest:
        hold_s = LONG_POLL_S if left_s is None else min(LONG_POLL_S, left_s)
        message = ClaimEpisodeRequest(
            client_uuid=self.settings.client_uuid,
            episode_type=episode_type,
            pool=pool,
            claim_request_id=uuid4().hex,
            allow_discard_timeout=self.settings.allow_discard_timeout,
            wait_s=hold_s,
            max_episodes=max_episodes,
            sends_key=True,
        )
        return post(CLAIM_PATH, message, hold_s=hold_s)

    def _ask(self, request: HttpRequest, parse: Callable[[bytes], T]) -> Operation[T]:
        response = yield from respond(request, timeout_s=self.settings.timeout_s, timing=self.timing)
        return read(response, parse)

    def _settle(
        self, episode: Episode, request: HttpRequest, within_s: float | None = None
    ) -> Operation[None]:
        timeout_s = self.settings.timeout_s
        if within_s is not None:
            request, timeout_s = replace(request, timeout_s=min(request.timeout_s, within_s)), within_s
        with episode.lease.settling():
            response = yield from respond(request, timeout_s=timeout_s, timing=self.timing)
            read(response, _read_success, may_lose_claim=True)


def episode_uuids(pool: str, task_id: str, group_size: int, round: str) -> list[str]:
    names = (json.dumps([pool, task_id, round, index]) for index in range(group_size))
    return [str(uuid5(NAMESPACE, name)) for name in names]


def _added(told: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    total = dict(told)
    for name, reward in more.items():
        call = call_id_of(name)
        total[call] = total.get(call, 0.0) + reward
    return total


def workflow_output(
    reward: float | list[float] | WorkflowOutput | None,
    *,
    is_success: bool | None,
    metadata: dict[str, JsonValue] | None,
    log_metrics: dict[str, float] | None,
    role_rewards: dict[str, float] | None = None,
    call_rewards: dict[str, float] | None = None,
) -> WorkflowOutput:
    """Combine the arguments of `end_episode`. They override a WorkflowOutput's; rewards of calls add up."""
    given: dict[str, Any] = {
        "is_success": is_success,
        "metadata": metadata,
        "log_metrics": log_metrics,
        "role_rewards": role_rewards,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(reward, WorkflowOutput):
        given["call_rewards"] = _added(reward.call_rewards, call_rewards or {})
        return WorkflowOutput.model_validate(dict(reward) | given)
    return WorkflowOutput(reward=reward, call_rewards=call_rewards or {}, **given)


def _claim_request(path: str, episode: Episode) -> HttpRequest:
    message = CanContinueEpisodeRequest(client_uuid=episode.client_uuid, episode_uuid=episode.episode_uuid)
    return post(path, message, key=episode.openai_api_key)


def _mark_lost(episode: Episode, reply: CanContinueEpisodeResponse) -> CanContinueEpisodeResponse:
    if not reply.can_continue and not reply.stale:
        episode.lease.lose(reply.reason)
    return reply


def _run_end_error(cause: str) -> RunFinishedError:
    return RunFinishedError(cause) if cause == RUN_FINISHED else RunFailedError(cause)


def _check_worth_waiting(reply: ClaimEpisodeResponse) -> None:
    if reply.retry_after_s > 0 or any(cause in reply.fail_cause for cause in (NO_EPISODES, WEIGHT_SYNCING)):
        return
    raise RequestRefusedError(200, reply.fail_cause or "the claim failed without a reason")


def _no_episode(episode_type: ClaimType, pool: str, wait_s: float, fail_cause: str) -> str:
    wanted = "" if episode_type == "any" else f"{episode_type} "
    where = f" in the pool {pool!r}" if pool else ""
    return (
        f"no {wanted}episode{where} within {wait_s:g} s; the server says: {fail_cause} "
        "Wait longer (wait_s), or run `tinkerscript status` to see what the server holds"
    )


def _read_success(body: bytes) -> None:
    reply = SuccessResponse.model_validate_json(body)
    if not reply.success:
        raise RequestRefusedError(200, reply.failure_reason or "the server gave no reason")
