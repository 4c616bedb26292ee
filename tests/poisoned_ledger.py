"""A ledger as an older version left it: one episode has more calls than a message to the trainer carries."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import EpisodeRow, Row
from tinkerscript.rollouts.call import Call
from tinkerscript.trainer_link.framing import MAX_MESSAGE_BYTES

POISONED = "poisoned"
"""The uuid of the episode."""


class PoisonedLedger(SqliteLedger):
    """Reads too many calls of `POISONED`, once it has ended."""

    poisoned = -1
    """The sequence of the episode, once it has ended."""

    def put(self, row: Row) -> None:
        if isinstance(row, EpisodeRow) and (row.uuid, row.state) == (POISONED, "ended"):
            self.poisoned = row.sequence
        super().put(row)

    async def calls(self, claims: Iterable[tuple[int, int]]) -> list[list[Call]]:
        claims = list(claims)
        found = await super().calls(claims)
        return [
            _too_many() if episode == self.poisoned else calls
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


def opened(url: str, folder: Path, durability: Literal["normal", "full"] = "normal") -> PoisonedLedger:
    """In place of `open_ledger`."""
    return PoisonedLedger(folder / LEDGER_FILE, durability=durability)
