"""`Episode`: one claim of one episode, and its `Lease`, which knows whether the claim still counts. No I/O.

Invariant: a lease changes once, from held to lost or to settled. While the result is being handed in, a
heartbeat's "lost" is ignored: the answer to the result itself decides.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import ClaimLostError
from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S, EpisodeClaim, EpisodeType


class Lease:
    """Whether one claim still counts, as far as this process knows. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settling = 0
        self._settled = False
        self._lost_because = ""

    @property
    def lost_because(self) -> str:
        """Why the server no longer accepts a result of this claim; empty while it does."""
        return self._lost_because

    @property
    def is_over(self) -> bool:
        """Whether the claim was lost, ended or given back."""
        return self._settled or bool(self._lost_because)

    def lose(self, reason: str) -> None:
        """Record that the server called the claim lost. Ignored while, and after, the claim is settled."""
        with self._lock:
            if not self._settling and not self._settled:
                self._lost_because = self._lost_because or reason or "the server gave no reason"

    @contextmanager
    def settling(self) -> Generator[None]:
        """Hand in the claim's result, or its abort, in this block. Keeps a ClaimLostError as the reason."""
        with self._lock:
            self._settling += 1
        settled, lost = False, ""
        try:
            yield
            settled = True
        except ClaimLostError as error:
            lost = str(error)
            raise
        finally:
            with self._lock:
                self._settling -= 1
                self._settled = self._settled or settled
                if lost and not self._settled:
                    self._lost_because = self._lost_because or lost


@dataclass(frozen=True)
class Episode:
    """One claim of one episode: what to do, and the model to do it with."""

    episode_uuid: str
    attempt: int
    """The number of this claim of the episode, from 1."""

    payload: dict[str, Any]
    """JSON that the trainer registered, such as `payload["sample"]["input"]`."""

    episode_type: EpisodeType
    group_id: str
    openai_base_url: str
    """The base URL for OpenAI's clients: it ends in `/v1`."""

    openai_api_key: str = field(repr=False)
    """Opens this claim alone, for as long as it holds the lease."""

    client_uuid: str = ""
    policy_version: int | None = None
    """Policy version when the episode was claimed."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without a model call or a heartbeat after which the claim lapses."""

    max_claim_s: float = 0.0
    """Seconds after which the claim is over, however active it is. 0: the server did not say."""

    lease: Lease = field(default_factory=Lease, repr=False, compare=False)
    """What this process knows about the claim."""

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for Anthropic's clients, which add `/v1/messages` themselves. The key is the same."""
        return self.openai_base_url.removesuffix("/v1")

    @property
    def lost(self) -> bool:
        """Whether the server said that a result of this claim no longer counts.

        Learned from the heartbeats of a Runner or of the episode's block, from `can_continue_episode` and
        `heartbeat_episode`, and from handing in. Poll this in a long computation, or call `check`. An
        `async with` block needs neither: it is canceled when a heartbeat learns of the loss, and raises
        ClaimLostError.
        """
        return bool(self.lease.lost_because)

    def check(self) -> None:
        """Raises ClaimLostError, with the reason, if the claim is known to be lost. Sends nothing."""
        if self.lost:
            raise ClaimLostError(self.lease.lost_because)


def episode_fields(claim: EpisodeClaim, settings: ClientSettings) -> dict[str, Any]:
    """The arguments of `Episode` for a claim that the client of `settings` made.

    A server of the first version does not name the lease: it uses the one that the client asked for.
    """
    return {
        "episode_uuid": claim.episode_uuid,
        "attempt": claim.attempt,
        "payload": claim.payload,
        "episode_type": claim.episode_type,
        "group_id": claim.group_id,
        "openai_base_url": claim.openai_base_url,
        "openai_api_key": claim.openai_api_key,
        "client_uuid": settings.client_uuid,
        "policy_version": claim.policy_version,
        "allow_discard_timeout": claim.allow_discard_timeout or settings.allow_discard_timeout,
        "max_claim_s": claim.max_claim_s,
    }
