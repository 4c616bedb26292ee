"""`tinkerjet_remote`: the ready-made client, configured from the environment.

The environment (see `environment`) is read when it is first used, so that importing it costs nothing and a
program may still set it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from pydantic import JsonValue

from tinkerscript.client.episode import Episode
from tinkerscript.client.settings import client_token, server_url
from tinkerscript.client.sync_client import ClaimedEpisode, TinkerScriptClient
from tinkerscript.protocol import (
    TRAINER_POOL,
    CanContinueEpisodeResponse,
    ClaimType,
    EngineStatusResponse,
    EpisodeType,
    WorkflowOutput,
)


class Remote:
    """A `TinkerScriptClient` that is made on first use; its methods are that client's."""

    def __init__(self) -> None:
        self._client: TinkerScriptClient | None = None
        self._lock = threading.Lock()

    @property
    def client(self) -> TinkerScriptClient:
        """The client behind. Raises ValueError for a URL or a token file that cannot be used."""
        with self._lock:
            if self._client is None:
                self._client = TinkerScriptClient(server_url(), token=client_token())
            return self._client

    @property
    def pool(self) -> str:
        """See `TinkerScriptClient.pool`."""
        return self.client.pool

    def begin_episode(
        self, episode_type: ClaimType = "any", wait_s: float | None = None, *, pool: str = TRAINER_POOL
    ) -> ClaimedEpisode:
        """See `TinkerScriptClient.begin_episode`."""
        return self.client.begin_episode(episode_type, wait_s, pool=pool)

    def register_episode(
        self,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType = "train",
        round: str = "",
    ) -> list[str]:
        """See `TinkerScriptClient.register_episode`."""
        return self.client.register_episode(
            payload, task_id=task_id, group_size=group_size, episode_type=episode_type, round=round
        )

    def end_episode(
        self,
        episode: Episode,
        reward: float | list[float] | WorkflowOutput,
        *,
        is_success: bool | None = None,
        metadata: dict[str, JsonValue] | None = None,
        log_metrics: dict[str, float] | None = None,
    ) -> None:
        """See `TinkerScriptClient.end_episode`."""
        self.client.end_episode(
            episode, reward, is_success=is_success, metadata=metadata, log_metrics=log_metrics
        )

    def abort_episode(self, episode: Episode, reason: str, kind: str = "aborted") -> None:
        """See `TinkerScriptClient.abort_episode`."""
        self.client.abort_episode(episode, reason, kind)

    def can_continue_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """See `TinkerScriptClient.can_continue_episode`."""
        return self.client.can_continue_episode(episode)

    def heartbeat_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """See `TinkerScriptClient.heartbeat_episode`."""
        return self.client.heartbeat_episode(episode)

    def get_engine_status(self) -> EngineStatusResponse:
        """See `TinkerScriptClient.get_engine_status`."""
        return self.client.get_engine_status()


tinkerjet_remote = Remote()
"""The client of the server that the environment names."""
