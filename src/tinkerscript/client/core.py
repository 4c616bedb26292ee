"""What a client says to the interchange server: its settings, its episodes, its requests. No I/O."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import NAMESPACE_URL, uuid4, uuid5

from pydantic import BaseModel, JsonValue

from tinkerscript.client.exchange import Done, Exchange, HttpRequest, Timing, Wait
from tinkerscript.errors import NoEpisodeError, RequestRefusedError
from tinkerscript.protocol import (
    DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
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
    EpisodeClaim,
    EpisodeType,
    Failure,
    RegisterEpisodeRequest,
    RegisterEpisodeResponse,
    WorkflowOutput,
    total_reward,
)

DEFAULT_TIMEOUT_S = 300.0
"""Seconds that an operation goes on while the server cannot be reached."""

LONG_POLL_S = 30.0
"""Seconds that one request for an episode may be held by the server."""

REPLY_TIMEOUT_S = 30.0
"""Seconds that a reply may take beyond the time that the server was asked to hold the request."""

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Who the client is and how patient."""

    server_url: str
    client_uuid: str
    token: str | None = field(default=None, repr=False)
    """Token of the client role; None where the server asks for none."""

    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Seconds that an operation goes on while the server cannot be reached. None: for ever."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without activity after which a claim lapses."""

    def __post_init__(self) -> None:
        if not self.server_url.startswith(("http://", "https://")):
            raise ValueError(f"server_url must start with http:// or https://, got {self.server_url!r}")

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {self.token}"} if self.token else headers


def make_settings(
    server_url: str,
    client_uuid: str | None,
    token: str | None,
    timeout_s: float | None,
    allow_discard_timeout: float,
) -> ClientSettings:
    """Settings with a client uuid of their own where none was given. Raises ValueError for a bad URL."""
    return ClientSettings(
        server_url.rstrip("/"), client_uuid or uuid4().hex, token, timeout_s, allow_discard_timeout
    )


@dataclass(frozen=True)
class Episode:
    """One claim of one episode: what to do, and the model to do it with."""

    episode_uuid: str
    attempt: int
    """The number of this claim of the episode, from 1."""

    payload: dict[str, Any]
    """JSON: what the trainer registered, such as `payload["sample"]["input"]`."""

    episode_type: EpisodeType
    group_id: str
    openai_base_url: str
    openai_api_key: str = field(repr=False)
    """Opens this claim alone, for as long as it holds the lease."""

    client_uuid: str = ""
    policy_version: int | None = None
    """Policy version when the episode was claimed."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without activity after which the claim lapses."""

    lost: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Set once a heartbeat has learned that this claim no longer counts: a long computation may stop."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: three of them in the time after which the claim would lapse."""
        return self.allow_discard_timeout / 3


class ClaimExchange(Exchange[ClaimEpisodeResponse]):
    """Ask for an episode until there is one, or the time that the caller gave is over."""

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
        """A new request, with an id of its own; repeated, it gets the same claims."""
        left_s = self._wait_s if left_s is None else left_s
        hold_s = LONG_POLL_S if left_s is None else min(LONG_POLL_S, left_s)
        message = ClaimEpisodeRequest(
            client_uuid=self._settings.client_uuid,
            episode_type=self._episode_type,
            allow_discard_timeout=self._settings.allow_discard_timeout,
            wait_s=hold_s,
            max_episodes=self._max_episodes,
            pool=self._pool,
            claim_request_id=uuid4().hex,
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
        if self._wait_s is None:
            self.request = self._claim()
            return Wait(delay_s)
        left_s = self._wait_s - (self.timing.clock() - self._started)
        if left_s <= 0:
            raise NoEpisodeError(f"no {self._episode_type} episode within {self._wait_s:g} s")
        delay_s = min(delay_s, left_s)
        self.request = self._claim(max(0.0, left_s - delay_s))
        return Wait(delay_s)


class ClientCore:
    """Makes the exchanges of one client."""

    def __init__(self, settings: ClientSettings, timing: Timing | None = None) -> None:
        self.settings = settings
        self._timing = timing or Timing()

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
            self.settings, episode_type, wait_s, self._timing, max_episodes=max_episodes, pool=pool
        )

    def register_episodes(
        self,
        payload: dict[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType,
        trial: int,
    ) -> dict[str, Exchange[None]]:
        """Register the episodes of one group in this client's own pool; the exchanges by episode uuid.

        The uuids follow from pool, task, trial and place in the group: repeated, nothing is doubled.
        Raises ValueError for a group of fewer than one.
        """
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        group = task_id if trial == 0 else f"{task_id}/trial-{trial}"
        name = f"tinkerscript:{self.settings.client_uuid}/{group}"
        uuids = [uuid5(NAMESPACE_URL, f"{name}/{number}").hex for number in range(group_size)]
        return {
            uuid: self._exchange(
                post(
                    "/register_episode",
                    RegisterEpisodeRequest(
                        episode_uuid=uuid,
                        client_uuid=self.settings.client_uuid,
                        episode_type=episode_type,
                        task_id=group,
                        group_size=group_size,
                        payload=payload,
                    ),
                ),
                _read_registered,
            )
            for uuid in uuids
        }

    def end_episode(self, episode: Episode, output: WorkflowOutput) -> Exchange[None]:
        """Hand in a result. Raises ValueError for a reward that is missing or not finite."""
        message = EndEpisodeRequest(
            client_uuid=episode.client_uuid,
            episode_uuid=episode.episode_uuid,
            attempt=episode.attempt,
            workflow_output=_checked(output),
        )
        return self._of_claim("/end_episode", message, _read_success)

    def abort_episode(self, episode: Episode, reason: str, kind: str) -> Exchange[None]:
        """Record why this attempt failed, and give the episode back."""
        message = AbortEpisodeRequest(
            client_uuid=episode.client_uuid,
            episode_uuid=episode.episode_uuid,
            attempt=episode.attempt,
            failure=Failure(kind=kind, message=reason, attempt=episode.attempt),
        )
        return self._of_claim("/abort_episode", message, _read_success)

    def can_continue_episode(self, episode: Episode) -> Exchange[CanContinueEpisodeResponse]:
        """Whether the episode still counts, and why not."""
        return self._still_counts("/can_continue_episode", episode)

    def heartbeat_episode(self, episode: Episode) -> Exchange[CanContinueEpisodeResponse]:
        """Renew the claim, without which it lapses while nothing else is heard of it."""
        return self._still_counts("/heartbeat_episode", episode)

    def _still_counts(self, path: str, episode: Episode) -> Exchange[CanContinueEpisodeResponse]:
        message = CanContinueEpisodeRequest(
            client_uuid=episode.client_uuid, episode_uuid=episode.episode_uuid, attempt=episode.attempt
        )
        return self._exchange(post(path, message), CanContinueEpisodeResponse.model_validate_json)

    def get_engine_status(self) -> Exchange[EngineStatusResponse]:
        """What the engine does and how many episodes there are."""
        request = HttpRequest("GET", "/get_engine_status", None, REPLY_TIMEOUT_S)
        return self._exchange(request, EngineStatusResponse.model_validate_json)

    def _of_claim(self, path: str, message: BaseModel, read: Callable[[bytes], ReplyT]) -> Exchange[ReplyT]:
        return self._exchange(post(path, message), read, may_lose_claim=True)

    def _exchange(
        self, request: HttpRequest, read: Callable[[bytes], ReplyT], *, may_lose_claim: bool = False
    ) -> Exchange[ReplyT]:
        return Exchange(
            request,
            read,
            timeout_s=self.settings.timeout_s,
            timing=self._timing,
            may_lose_claim=may_lose_claim,
        )


def post(path: str, message: BaseModel, *, hold_s: float = 0.0) -> HttpRequest:
    """A POST of `message` as JSON, which the server may hold for `hold_s` seconds."""
    return HttpRequest("POST", path, message.model_dump_json().encode(), hold_s + REPLY_TIMEOUT_S)


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


def episode_fields(reply: EpisodeClaim, settings: ClientSettings) -> dict[str, Any]:
    """The arguments of `Episode` for a claim that succeeded."""
    return {
        "episode_uuid": reply.episode_uuid,
        "attempt": reply.attempt,
        "payload": reply.payload,
        "episode_type": reply.episode_type,
        "group_id": reply.group_id,
        "openai_base_url": reply.openai_base_url,
        "openai_api_key": reply.openai_api_key,
        "client_uuid": settings.client_uuid,
        "policy_version": reply.policy_version,
        "allow_discard_timeout": reply.allow_discard_timeout or settings.allow_discard_timeout,
    }


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


def _read_registered(body: bytes) -> None:
    reply = RegisterEpisodeResponse.model_validate_json(body)
    if not reply.success:
        raise RequestRefusedError(200, reply.failure_reason or "the server gave no reason")


def _read_success(body: bytes) -> None:
    reply = EndEpisodeResponse.model_validate_json(body)
    if not reply.success:
        raise RequestRefusedError(200, reply.failure_reason or "the server gave no reason")
