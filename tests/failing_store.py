"""A store that fails for one episode, at one stage, by an exception that nobody expects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.sqlite import STORE_FILE, SqliteStore

VICTIM = "victim"
"""The uuid of the episode."""


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
