"""Claiming: ask for an episode until there is one. No I/O.

Registering: the episodes of one group, from a client's own samples, into a pool of its own. No I/O.

Invariant: the uuids follow from the pool, the task id, the round and the place in the group, so that a group
registered again, by this process or the next, is the same group.

Heartbeats: how one claim is renewed, and how often. No I/O.

What a client says to the interchange server, one exchange for each operation. No I/O.

Shared by the sync and the async face, which only send, sleep and remember what a claim was told.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID, uuid4, uuid5

from pydantic import BaseModel, JsonValue

from tinkerscript.client.episode import Episode
from tinkerscript.client.exchange import (
    REPLY_TIMEOUT_S,
    Done,
    Exchange,
    HttpRequest,
    Timing,
    Wait,
    post,
    read_reason,
)
from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import NoEpisodeError, RequestRefusedError
from tinkerscript.protocol import (
    MAX_ID_CHARS,
    NO_EPISODES,
    TRAINER_POOL,
    WEIGHT_SYNCING,
    AbortEpisodeRequest,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimType,
    EndEpisodeRequest,
    EndEpisodeResponse,
    EngineStatusResponse,
    EpisodeType,
    Failure,
    RegisterEpisodeRequest,
    RegisterEpisodeResponse,
    WorkflowOutput,
    total_reward,
)

LONG_POLL_S = 30.0
"""Seconds that one request for an episode may be held by the server."""


class ClaimExchange(Exchange[ClaimEpisodeResponse]):
    """Ask for an episode until there is one, or the time that the caller gave is over.

    Invariant: a request is repeated with its `claim_request_id` until it has a definite answer, so that
    claims whose reply was lost come with the repetition; the next request has an id of its own.
    """

    def __init__(
        self,
        settings: ClientSettings,
        episode_type: ClaimType,
        wait_s: float | None,
        timing: Timing,
        *,
        max_episodes: int = 1,
        pool: str = TRAINER_POOL,
    ) -> None:
        if wait_s is not None and not wait_s >= 0:
            raise ValueError(f"wait_s must be a number of seconds or None, got {wait_s!r}")
        self._settings = settings
        self._episode_type: ClaimType = episode_type
        self._wait_s = wait_s
        self._max_episodes = max_episodes
        self._pool = pool
        self._started = timing.clock()
        self._empty = 0
        super().__init__(
            self._claim(),
            ClaimEpisodeResponse.model_validate_json,
            timeout_s=settings.timeout_s,
            timing=timing,
        )

    def _claim(self, left_s: float | None = None) -> HttpRequest:
        left_s = self._wait_s if left_s is None else left_s
        hold_s = LONG_POLL_S if left_s is None else min(LONG_POLL_S, left_s)
        message = ClaimEpisodeRequest(
            client_uuid=self._settings.client_uuid,
            episode_type=self._episode_type,
            pool=self._pool,
            claim_request_id=uuid4().hex,
            allow_discard_timeout=self._settings.allow_discard_timeout,
            wait_s=hold_s,
            max_episodes=self._max_episodes,
            sends_attempt=True,
        )
        return post("/claim_episode", message, hold_s=hold_s)

    def accept(self, value: ClaimEpisodeResponse) -> Done[ClaimEpisodeResponse] | Wait:
        if value.success:
            return Done(value)
        told_to_wait = value.retry_after_s > 0 or NO_EPISODES in value.fail_cause
        if not told_to_wait and WEIGHT_SYNCING not in value.fail_cause:
            raise RequestRefusedError(200, value.fail_cause or "the claim failed without a reason")
        delay_s = self.timing.delay(self._empty, value.retry_after_s or None)
        self._empty += 1
        if self._wait_s is not None:
            left_s = self._wait_s - (self.timing.clock() - self._started)
            if left_s <= 0:
                raise NoEpisodeError(self._nothing(value.fail_cause))
            delay_s = min(delay_s, left_s)
            self.request = self._claim(max(0.0, left_s - delay_s))
        else:
            self.request = self._claim()
        return Wait(delay_s)

    def _nothing(self, fail_cause: str) -> str:
        wanted = "" if self._episode_type == "any" else f"{self._episode_type} "
        where = f" in the pool {self._pool!r}" if self._pool else ""
        return (
            f"no {wanted}episode{where} within {self._wait_s:g} s, the server says: {fail_cause} "
            "Wait longer (wait_s), or see what the server holds: tinkerscript status"
        )


NAMESPACE = UUID("8e2c4d0e-6f0b-5c53-9d0a-0f5f1f1a7c11")
"""Of the uuids that clients derive."""


def episode_uuids(pool: str, task_id: str, group_size: int, round: str) -> list[str]:
    """The uuids of a group's episodes, in order."""
    names = (json.dumps([pool, task_id, round, index]) for index in range(group_size))
    return [str(uuid5(NAMESPACE, name)) for name in names]


class RegisterExchange(Exchange[list[str]]):
    """Register the episodes of a group one after the other; the value is their uuids."""

    def __init__(
        self,
        settings: ClientSettings,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType,
        round: str,
        timing: Timing,
    ) -> None:
        """Raises ValueError for an empty or long task id, or a group size below 1."""
        named = f"{task_id}#{round}" if round else task_id
        if not task_id or len(named) > MAX_ID_CHARS:
            raise ValueError(
                f"task_id (with its round) must have 1 to {MAX_ID_CHARS} characters, got {named!r}"
            )
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self._message = RegisterEpisodeRequest(
            episode_uuid="-",
            client_uuid=settings.client_uuid,
            episode_type=episode_type,
            task_id=named,
            group_size=group_size,
            payload=dict(payload),
        )
        self._uuids = episode_uuids(settings.client_uuid, task_id, group_size, round)
        self._registered = 0
        super().__init__(self._next(), self._read_one, timeout_s=settings.timeout_s, timing=timing)

    def accept(self, value: list[str]) -> Done[list[str]] | Wait:
        self._registered += 1
        if self._registered == len(self._uuids):
            return Done(value)
        self.request = self._next()
        return Wait(0.0)

    def _next(self) -> HttpRequest:
        uuid = self._uuids[self._registered]
        return post("/register_episode", self._message.model_copy(update={"episode_uuid": uuid}))

    def _read_one(self, body: bytes) -> list[str]:
        reply = RegisterEpisodeResponse.model_validate_json(body)
        if not reply.success:
            raise RequestRefusedError(200, reply.failure_reason or "the server gave no reason")
        return self._uuids


BEATS_PER_LEASE = 3


_PATH = "/heartbeat_episode"


_FALLBACK = "/can_continue_episode"


_LOST = frozenset({409, 410})


def interval_s(episode: Episode, timing: Timing) -> float:
    """Seconds until the next heartbeat: a third of the lease, or a little less, so that many spread out."""
    return episode.allow_discard_timeout / BEATS_PER_LEASE * timing.uniform(0.75, 1.0)


class HeartbeatExchange(Exchange[CanContinueEpisodeResponse]):
    """Renew one claim. A claim that is lost is an answer here, not an error.

    A server without `/heartbeat_episode` is asked `/can_continue_episode`, which renews the lease as well. An
    outage is asked about at least as often as the lease needs.
    """

    def __init__(self, episode: Episode, *, timeout_s: float | None, timing: Timing) -> None:
        message = CanContinueEpisodeRequest(
            client_uuid=episode.client_uuid, episode_uuid=episode.episode_uuid, attempt=episode.attempt
        )
        self._most_s = episode.allow_discard_timeout / BEATS_PER_LEASE
        super().__init__(
            post(_PATH, message),
            CanContinueEpisodeResponse.model_validate_json,
            timeout_s=timeout_s,
            timing=timing,
        )

    def answered(
        self, status: int, headers: Mapping[str, str], body: bytes
    ) -> Done[CanContinueEpisodeResponse] | Wait:
        if status == 404 and self.request.path == _PATH:
            self.request = replace(self.request, path=_FALLBACK)
            return Wait(0.0)
        if status in _LOST:
            return Done(CanContinueEpisodeResponse(can_continue=False, reason=read_reason(body)))
        return self._soon(super().answered(status, headers, body))

    def unreachable(self, error: Exception) -> Wait:
        return Wait(min(super().unreachable(error).delay_s, self._most_s))

    def _soon(self, step: Done[CanContinueEpisodeResponse] | Wait) -> Done[CanContinueEpisodeResponse] | Wait:
        return Wait(min(step.delay_s, self._most_s)) if isinstance(step, Wait) else step


ReplyT = TypeVar("ReplyT")


TASK_ERROR = "task_error"
"""Kind of the failure of an attempt whose program raised."""


class ClientCore:
    """Makes the exchanges of one client."""

    def __init__(self, settings: ClientSettings, timing: Timing | None = None) -> None:
        self.settings = settings
        self.timing = timing or Timing()

    def begin_episode(
        self,
        episode_type: ClaimType,
        wait_s: float | None,
        *,
        max_episodes: int = 1,
        pool: str = TRAINER_POOL,
    ) -> ClaimExchange:
        """Claim episodes. The exchange raises NoEpisodeError after `wait_s` seconds without one."""
        return ClaimExchange(
            self.settings, episode_type, wait_s, self.timing, max_episodes=max_episodes, pool=pool
        )

    def register_episode(
        self,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType,
        round: str,
    ) -> RegisterExchange:
        """Register a group. Raises ValueError for arguments that cannot be one."""
        return RegisterExchange(
            self.settings,
            payload,
            task_id=task_id,
            group_size=group_size,
            episode_type=episode_type,
            round=round,
            timing=self.timing,
        )

    def end_episode(self, episode: Episode, output: WorkflowOutput) -> Exchange[None]:
        """Hand in a result. Raises ValueError for a reward that is missing or not finite."""
        message = EndEpisodeRequest(
            client_uuid=episode.client_uuid,
            episode_uuid=episode.episode_uuid,
            attempt=episode.attempt,
            workflow_output=_checked(output),
        )
        return self._of_claim("/end_episode", message, _read_success)

    def abort_episode(
        self, episode: Episode, reason: str, kind: str, *, within_s: float | None = None
    ) -> Exchange[None]:
        """Record why this attempt failed, and give the episode back, within `within_s` seconds if given."""
        message = AbortEpisodeRequest(
            client_uuid=episode.client_uuid,
            episode_uuid=episode.episode_uuid,
            attempt=episode.attempt,
            failure=Failure(kind=kind, message=reason, attempt=episode.attempt),
        )
        return self._of_claim("/abort_episode", message, _read_success, within_s)

    def can_continue_episode(self, episode: Episode) -> Exchange[CanContinueEpisodeResponse]:
        """Whether the episode still counts, and why not."""
        message = CanContinueEpisodeRequest(
            client_uuid=episode.client_uuid, episode_uuid=episode.episode_uuid, attempt=episode.attempt
        )
        return self._exchange(
            post("/can_continue_episode", message), CanContinueEpisodeResponse.model_validate_json
        )

    def heartbeat_episode(self, episode: Episode) -> HeartbeatExchange:
        """Renew the claim."""
        return HeartbeatExchange(episode, timeout_s=self.settings.timeout_s, timing=self.timing)

    def get_engine_status(self) -> Exchange[EngineStatusResponse]:
        """What the engine does and how many episodes there are."""
        request = HttpRequest("GET", "/get_engine_status", None, REPLY_TIMEOUT_S)
        return self._exchange(request, EngineStatusResponse.model_validate_json)

    def _of_claim(
        self, path: str, message: BaseModel, read: Callable[[bytes], ReplyT], within_s: float | None = None
    ) -> Exchange[ReplyT]:
        request, timeout_s = post(path, message), self.settings.timeout_s
        if within_s is not None:
            request = replace(request, timeout_s=min(request.timeout_s, within_s))
            timeout_s = within_s
        return Exchange(request, read, timeout_s=timeout_s, timing=self.timing, may_lose_claim=True)

    def _exchange(self, request: HttpRequest, read: Callable[[bytes], ReplyT]) -> Exchange[ReplyT]:
        return Exchange(request, read, timeout_s=self.settings.timeout_s, timing=self.timing)


def workflow_output(
    reward: float | list[float] | WorkflowOutput,
    *,
    is_success: bool | None,
    metadata: dict[str, JsonValue] | None,
    log_metrics: dict[str, float] | None,
) -> WorkflowOutput:
    """The arguments of `end_episode` as one message; what is given replaces what a WorkflowOutput holds."""
    given: dict[str, Any] = {"is_success": is_success, "metadata": metadata, "log_metrics": log_metrics}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(reward, WorkflowOutput):
        return reward.model_copy(update=given)
    return WorkflowOutput(reward=reward, **given)


def noted(episode: Episode, reply: CanContinueEpisodeResponse) -> CanContinueEpisodeResponse:
    """`reply`, after the episode's lease took note of it."""
    if not reply.can_continue:
        episode.lease.lose(reply.reason)
    return reply


def failure_line(error: BaseException) -> str:
    """The last line of the error's traceback, such as `ZeroDivisionError: division by zero`."""
    return traceback.format_exception_only(error)[-1].strip()


def _checked(output: WorkflowOutput) -> WorkflowOutput:
    reward = total_reward(output)
    if reward is None:
        raise ValueError("an episode ends with a reward; use abort_episode for an attempt that has none")
    if not math.isfinite(reward):
        raise ValueError(f"the reward must be a finite number, got {output.reward!r}")
    return output


def _read_success(body: bytes) -> None:
    reply = EndEpisodeResponse.model_validate_json(body)
    if not reply.success:
        raise RequestRefusedError(200, reply.failure_reason or "the server gave no reason")
