"""What fails for one episode, at one stage, by an exception that nobody expects: a method, or a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.sqlite import STORE_FILE, SqliteStore

VICTIM = "victim"
"""The uuid of the episode."""


def planted(work: Callable[..., Any], stage: str, *marks: str) -> Callable[..., Any]:
    """`work`, which fails where its arguments are the victim's, or hold one of `marks`."""

    def failing(*args: Any, **more: Any) -> Any:
        if any(each in str((args, more)) for each in (f"'{VICTIM}'", *marks)):
            raise RuntimeError(f"planted: {stage}")
        return work(*args, **more)

    return failing


class FailingStore(SqliteStore):
    """Fails at `stage`: `record` (a call is stored) or `delivery` (the calls of a result are read)."""

    stage: ClassVar[str] = ""

    def add_call(self, episode: EpisodeRecord, attempt: int, call: Call) -> None:
        if self.stage == "record" and episode.uuid == VICTIM:
            raise RuntimeError("planted: record")
        super().add_call(episode, attempt, call)

    async def calls(self, claims: Sequence[tuple[EpisodeRecord, int]]) -> list[list[Call]]:
        ended = [episode.uuid for episode, _ in claims if episode.state == "ended"]
        if self.stage == "delivery" and VICTIM in ended:
            raise RuntimeError("planted: delivery")
        return await super().calls(claims)


def opened(url: str, folder: Path, durability: Literal["normal", "full"]) -> FailingStore:
    """What `interchange_server.store` names."""
    return FailingStore(folder / STORE_FILE, durability=durability)
