"""What a client says to the interchange server, one exchange for each operation. No I/O.

Shared by the sync and the async face, which only send, sleep and remember what a claim was told.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue

from tinkerscript.client.claiming import ClaimExchange
from tinkerscript.client.episode import Episode
from tinkerscript.client.exchange import REPLY_TIMEOUT_S, Exchange, HttpRequest, Timing, post
from tinkerscript.client.heartbeat import HeartbeatExchange
from tinkerscript.client.registering import RegisterExchange
from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import RequestRefusedError
from tinkerscript.protocol import (
    TRAINER_POOL,
    AbortEpisodeRequest,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimType,
    EndEpisodeRequest,
    EndEpisodeResponse,
    EngineStatusResponse,
    EpisodeType,
    Failure,
    WorkflowOutput,
    total_reward,
)

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
