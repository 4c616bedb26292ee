"""`EpisodeSource`: the seam between the training loop and the interchange server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from tinkerscript.ledger.rows import TrainerRow
from tinkerscript.protocol import EpisodeType
from tinkerscript.trainer_link.messages import BatchProgress, NewEpisode, Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    episode_type: EpisodeType
    group_id: str
    payload: dict[str, Any]
    """`task`: its name; `sample`: the Inspect sample as JSON."""

    position: int = -1
    label: str = ""
    episode_uuid: str = field(default_factory=lambda: uuid4().hex)


class EpisodeSource:
    own_clients = ""
    """Prefix of the `client_uuid`s of this run's clients."""

    def __init__(
        self, link: TrainerLink, *, group_size: int, client_samples: bool = True, has_workers: bool = False
    ) -> None:
        self._link = link
        if has_workers:
            self.own_clients = link.own_clients
        self._group_size = group_size
        link.set_status(client_samples=client_samples)

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        """Known uuids continue. `step`: the first that can train on them."""
        await self._link.register(
            [
                NewEpisode(
                    episode_uuid=episode.episode_uuid,
                    episode_type=episode.episode_type,
                    group_id=episode.group_id,
                    payload=msgspec.json.encode(episode.payload),
                    group_size=self._group_size,
                    step=step,
                    label=episode.label,
                    position=episode.position,
                )
                for episode in episodes
            ]
        )

    async def outcomes(self) -> list[Outcome]:
        return await self._link.outcomes()

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        if episode_uuids:
            self._link.cancel(episode_uuids, reason)

    def note(self, rows: Collection[TrainerRow]) -> None:
        self._link.note(rows)

    async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
        await self._link.commit(rows)

    def set_status(self, **changed: Any) -> None:
        self._link.set_status(**changed)

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        self._link.set_batch(batch, at_once=at_once)
