"""Heartbeats: how one claim is renewed, and how often. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tinkerscript.client.episode import Episode
from tinkerscript.client.exchange import Done, Exchange, Timing, Wait, post, read_reason
from tinkerscript.protocol import CanContinueEpisodeRequest, CanContinueEpisodeResponse

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
