"""`TinkerScriptClient`: the client for ordinary, blocking programs. May be used from several threads."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import JsonValue

from tinkerscript.client.core import (
    DEFAULT_TIMEOUT_S,
    ClientCore,
    ClientSettings,
    Episode,
    episode_fields,
    failure_line,
    make_settings,
    workflow_output,
)
from tinkerscript.client.exchange import Exchange, Wait
from tinkerscript.errors import ClaimLostError
from tinkerscript.protocol import (
    DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    CanContinueEpisodeResponse,
    ClaimType,
    EngineStatusResponse,
    WorkflowOutput,
)

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")


class TinkerScriptClient:
    """Claims episodes from an interchange server and hands in their results.

    Requests are repeated while the server is away or busy; `timeout_s` says for how long.
    """

    def __init__(
        self,
        server_url: str,
        *,
        client_uuid: str | None = None,
        token: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    ) -> None:
        """Nothing is sent yet.

        `timeout_s` are the seconds that an operation goes on while the server cannot be reached (None:
        for ever); `allow_discard_timeout` the seconds without activity after which a claim lapses.
        """
        self.settings: ClientSettings = make_settings(
            server_url, client_uuid, token, timeout_s, allow_discard_timeout
        )
        self._core = ClientCore(self.settings)
        self._http = httpx.Client(
            base_url=self.settings.server_url,
            headers=self.settings.headers(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    def begin_episode(self, episode_type: ClaimType = "any", wait_s: float | None = None) -> ClaimedEpisode:
        """Claim an episode; wait for one as long as `wait_s` seconds say (None: for ever).

        As a context manager the episode is given back with the reason when its block raises.
        Raises NoEpisodeError, ServerUnreachableError or RequestRefusedError.
        """
        reply = self._run(self._core.begin_episode(episode_type, wait_s))
        return ClaimedEpisode(**episode_fields(reply, self.settings), client=self)

    def begin_episodes(
        self, max_episodes: int, episode_type: ClaimType = "any", wait_s: float | None = None
    ) -> list[ClaimedEpisode]:
        """Claim up to `max_episodes` (1 to 256) with one request; waits until there is at least one.

        Raises NoEpisodeError, ServerUnreachableError or RequestRefusedError.
        """
        reply = self._run(self._core.begin_episode(episode_type, wait_s, max_episodes=max_episodes))
        claims = [reply, *reply.more]
        return [ClaimedEpisode(**episode_fields(claim, self.settings), client=self) for claim in claims]

    def end_episode(
        self,
        episode: Episode,
        reward: float | list[float] | WorkflowOutput,
        *,
        is_success: bool | None = None,
        metadata: dict[str, JsonValue] | None = None,
        log_metrics: dict[str, float] | None = None,
    ) -> None:
        """Hand in the episode's result, and return once it is stored. Safe to repeat.

        Raises ClaimLostError when the result does not count any more, ValueError for a reward that is
        missing or not finite, ServerUnreachableError or RequestRefusedError.
        """
        output = workflow_output(reward, is_success=is_success, metadata=metadata, log_metrics=log_metrics)
        self._run(self._core.end_episode(episode, output))

    def abort_episode(self, episode: Episode, reason: str, kind: str = "aborted") -> None:
        """Give the episode back: this attempt failed for `reason`. `kind` is a stable word.

        Raises ClaimLostError, ServerUnreachableError or RequestRefusedError.
        """
        self._run(self._core.abort_episode(episode, reason, kind))

    def can_continue_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Whether the episode still counts, and why not. Renews the claim."""
        return self._run(self._core.can_continue_episode(episode))

    def get_engine_status(self) -> EngineStatusResponse:
        """What the engine does, the policy version, and how many episodes are in each state."""
        return self._run(self._core.get_engine_status())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> TinkerScriptClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, exchange: Exchange[ReplyT]) -> ReplyT:
        while True:
            request = exchange.request
            try:
                response = self._http.request(
                    request.method, request.path, content=request.body, timeout=request.timeout_s
                )
            except httpx.TransportError as error:
                step = exchange.unreachable(error)
            else:
                step = exchange.answered(response.status_code, response.headers, response.content)
            if not isinstance(step, Wait):
                return step.value
            time.sleep(step.delay_s)


@dataclass(frozen=True, kw_only=True)
class ClaimedEpisode(Episode):
    """An episode that gives itself back, with the reason, when its `with` block raises."""

    client: TinkerScriptClient = field(repr=False, compare=False)

    def __enter__(self) -> ClaimedEpisode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ClaimLostError):
            return
        try:
            self.client.abort_episode(self, failure_line(error), "task_error")
        except ClaimLostError as lost:
            logger.warning("episode %s was lost before it was given back: %s", self.episode_uuid, lost)
