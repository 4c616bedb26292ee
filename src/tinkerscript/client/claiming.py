"""Claiming: ask for an episode until there is one. No I/O."""

from __future__ import annotations

from uuid import uuid4

from tinkerscript.client.exchange import Done, Exchange, HttpRequest, Timing, Wait, post
from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import NoEpisodeError, RequestRefusedError
from tinkerscript.protocol import (
    NO_EPISODES,
    TRAINER_POOL,
    WEIGHT_SYNCING,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    ClaimType,
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
