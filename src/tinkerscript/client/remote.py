"""`tinkerjet_remote`: the ready-made client, configured from the environment.

TINKERSCRIPT_SERVER_URL (default http://127.0.0.1:10086) and TINKERSCRIPT_CLIENT_TOKEN are read when it is
first used, so that importing it costs nothing and a program may still set them.
"""

from __future__ import annotations

import os
import threading

from pydantic import JsonValue

from tinkerscript.client.episode import Episode
from tinkerscript.client.sync_client import ClaimedEpisode, TinkerScriptClient
from tinkerscript.protocol import (
    CanContinueEpisodeResponse,
    ClaimType,
    EngineStatusResponse,
    WorkflowOutput,
)

DEFAULT_SERVER_URL = "http://127.0.0.1:10086"


class Remote:
    """A `TinkerScriptClient` that is made on first use; its methods are that client's."""

    def __init__(self) -> None:
        self._client: TinkerScriptClient | None = None
        self._lock = threading.Lock()

    @property
    def client(self) -> TinkerScriptClient:
        """The client behind. Raises ValueError if TINKERSCRIPT_SERVER_URL is no HTTP URL."""
        with self._lock:
            if self._client is None:
                self._client = TinkerScriptClient(
                    os.environ.get("TINKERSCRIPT_SERVER_URL") or DEFAULT_SERVER_URL,
                    token=os.environ.get("TINKERSCRIPT_CLIENT_TOKEN") or None,
                )
            return self._client

    def begin_episode(self, episode_type: ClaimType = "any", wait_s: float | None = None) -> ClaimedEpisode:
        """See `TinkerScriptClient.begin_episode`."""
        return self.client.begin_episode(episode_type, wait_s)

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

    def get_engine_status(self) -> EngineStatusResponse:
        """See `TinkerScriptClient.get_engine_status`."""
        return self.client.get_engine_status()


tinkerjet_remote = Remote()
"""The client of the server that the environment names."""
