"""A store as an older version left it: one episode has more calls than a message to the trainer can carry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.sqlite import STORE_FILE, SqliteStore
from tinkerscript.trainer_link.framing import MAX_MESSAGE_BYTES

POISONED = "poisoned"
"""The uuid of the episode."""


class PoisonedStore(SqliteStore):
    """Reads too many calls of `POISONED`, once it has ended."""

    async def calls(self, claims: Sequence[tuple[EpisodeRecord, int]]) -> list[list[Call]]:
        found = await super().calls(claims)
        return [
            _too_many() if (episode.uuid, episode.state) == (POISONED, "ended") else calls
            for (episode, _), calls in zip(claims, found, strict=True)
        ]


def _too_many() -> list[Call]:
    large = Call(
        call_id="c",
        parent_id=None,
        new_prompt=b"",
        sampled=b"",
        logprobs=b"",
        stop_reason="stop",
        policy_version=4,
        messages=json.dumps([{"role": "user", "content": "x" * 2**24}]),
    )
    return [large] * (1 + MAX_MESSAGE_BYTES // len(large.messages))


def opened(url: str, folder: Path, durability: Literal["normal", "full"]) -> PoisonedStore:
    """What `interchange_server.store` names."""
    return PoisonedStore(folder / STORE_FILE, durability=durability)
