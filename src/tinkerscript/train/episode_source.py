"""`EpisodeSource`: the seam between the training loop and what runs episodes, the interchange server."""

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
    """One episode to run, of one sample."""

    episode_type: EpisodeType
    group_id: str
    payload: dict[str, Any]
    """`task`: the task's name; `sample`: the Inspect sample as JSON."""

    position: int = -1
    """The sample's, in the order of training samples; -1 for an evaluation."""

    label: str = ""
    """Of its evaluation; empty for training."""

    episode_uuid: str = field(default_factory=lambda: uuid4().hex)


class EpisodeSource:
    """Registers episodes with the interchange server, whose clients run them, and has the run's ledger there.
    Each outcome is delivered once."""

    own_clients = ""
    """What the `client_uuid` of each client begins with that belongs to this run."""

    def __init__(
        self, link: TrainerLink, *, group_size: int, client_samples: bool = True, has_workers: bool = False
    ) -> None:
        """`client_samples`: whether samples that clients register may train; `has_workers`: whether the
        trainer runs workers of its own, beside others'."""
        self._link = link
        if has_workers:
            self.own_clients = link.own_clients
        self._group_size = group_size
        link.set_status(client_samples=client_samples)

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        """Run these, on which `step` is the first that can train, or which are of an evaluation after it. An
        episode that is known already (by uuid) continues."""
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
        """Episodes that ended; waits for at least one."""
        return await self._link.outcomes()

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        """Cancel episodes. Each still gets an outcome: cancelled, or the result it already had."""
        if episode_uuids:
            self._link.cancel(episode_uuids, reason)

    def note(self, rows: Collection[TrainerRow]) -> None:
        """Write rows into the ledger, in one transaction, without waiting for it."""
        self._link.note(rows)

    async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
        """Write rows into the ledger, in one transaction; return once they, and all before them, are
        committed."""
        await self._link.commit(rows)

    def set_status(self, **changed: Any) -> None:
        """As `TrainerLink.set_status`: what the engine does, and which versions may train in the batch that
        takes results now."""
        self._link.set_status(**changed)

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        """This batch is being filled; None: none is. `at_once`: not only when it suits."""
        self._link.set_batch(batch, at_once=at_once)
