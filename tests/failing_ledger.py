"""What fails for one episode, at one stage, by an exception that nobody expects: a method, or a ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from rollout_helpers import make_call
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import EpisodeRow, Row
from tinkerscript.rollouts.call import Call
from tinkerscript.trainer_link.framing import MAX_MESSAGE_BYTES

VICTIM = "victim"
"""The uuid of the episode."""


def planted(work: Callable[..., Any], stage: str, *marks: str) -> Callable[..., Any]:
    """`work`, which fails where its arguments are the victim's, or hold one of `marks`."""

    def failing(*args: Any, **more: Any) -> Any:
        if any(each in str((args, more)) for each in (f"'{VICTIM}'", *marks)):
            raise RuntimeError(f"planted: {stage}")
        return work(*args, **more)

    return failing


class FailingLedger(SqliteLedger):
    """Fails at `stage`: `record` (a call is stored) or `delivery` (the calls of a result are read).

    At the stage `size`, the victim's result has more calls than a message to the trainer carries.
    """

    stage: ClassVar[str] = ""
    victim: EpisodeRow | None = None
    """As it was written last."""

    def put(self, row: Row) -> None:
        if isinstance(row, EpisodeRow) and row.uuid == VICTIM:
            self.victim = row
        super().put(row)

    def put_call(self, episode: int, attempt: int, call: Call) -> None:
        if self.stage == "record" and self.victim is not None and episode == self.victim.sequence:
            raise RuntimeError("planted: record")
        super().put_call(episode, attempt, call)

    async def calls(self, claims: Iterable[tuple[int, int]]) -> list[list[Call]]:
        claims, victim = list(claims), self.victim
        ended = {victim.sequence} if victim is not None and victim.state == "ended" else set[int]()
        if self.stage == "delivery" and ended & dict(claims).keys():
            raise RuntimeError("planted: delivery")
        found = await super().calls(claims)
        if self.stage != "size":
            return found
        pairs = zip(claims, found, strict=True)
        return [too_many() if episode in ended else calls for (episode, _), calls in pairs]


def too_many() -> list[Call]:
    large = make_call(None, [], [], messages=json.dumps([{"role": "user", "content": "x" * 2**24}]))
    return [large] * (1 + MAX_MESSAGE_BYTES // len(large.messages))


def opened(url: str, folder: Path, durability: Literal["normal", "full"] = "normal") -> FailingLedger:
    """In place of `open_ledger`."""
    return FailingLedger(folder / LEDGER_FILE, durability=durability)
