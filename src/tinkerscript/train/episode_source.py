"""The seam between the training loop and what runs episodes: `NetworkSource`, which hands them to clients
through the interchange server. The loop sees their outcomes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from tinkerscript.protocol import EngineStatus, EpisodeType
from tinkerscript.train.journal import EpisodeRegistered
from tinkerscript.trainer_link.messages import BatchProgress, EpisodeFailed, NewEpisode, Outcome
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

    episode_uuid: str = field(default_factory=lambda: uuid4().hex)


class EpisodeSource(ABC):
    """Runs episodes. Each outcome is delivered at least once, until it is acknowledged.

    What has a default is for episodes that run elsewhere.
    """

    own_clients = ""
    """What the `client_uuid` of each client begins with that belongs to this run."""

    @abstractmethod
    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        """Run these. An episode that is running already (by uuid) continues."""

    @abstractmethod
    async def outcomes(self) -> list[Outcome]:
        """Episodes that ended; waits for at least one."""

    @abstractmethod
    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        """Cancel episodes. Each still gets an outcome: cancelled, or the result it already had."""

    @abstractmethod
    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """Cancel episodes of an earlier trainer: registered, or not yet registered when it died."""

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027 (most have nothing to do)
        """These outcomes are durable in the journal."""

    async def lost(self, registered: Sequence[EpisodeRegistered]) -> list[EpisodeFailed]:
        """Those of a former trainer's episodes whose outcome it acknowledged, though its journal lacks it.

        Only a power cut, or a disk that lies, can take the end of a journal away.
        """
        del registered
        return []

    async def flush(self) -> None:  # noqa: B027
        """Return once every acknowledgement has taken effect."""

    def set_status(  # noqa: B027
        self,
        *,
        engine_status: EngineStatus | None = None,
        policy_version: int | None = None,
        global_step: int | None = None,
        usable_versions: list[int] | None = None,
    ) -> None:
        """What the engine does and which versions may train in the batch that takes results now; None leaves
        a value unchanged."""

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:  # noqa: B027
        """This batch is being filled; None: none is. `at_once`: not only when it suits."""


class NetworkSource(EpisodeSource):
    """Registers episodes with the interchange server, whose clients run them."""

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

    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        size = self._group_size
        await self._link.register(
            [_new(episode, msgspec.json.encode(episode.payload), size) for episode in episodes]
        )

    async def outcomes(self) -> list[Outcome]:
        return await self._link.outcomes()

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._link.acknowledge([o.episode_uuid for o in outcomes])

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        if episode_uuids:
            self._link.cancel(episode_uuids, reason)

    async def lost(self, registered: Sequence[EpisodeRegistered]) -> list[EpisodeFailed]:
        recorded = await self._link.recorded_outcomes([event.episode_uuid for event in registered])
        archived = {uuid for uuid, outcome in recorded.items() if outcome.acknowledged}
        reason = "the server archived the outcome, but the journal no longer has it (power failure?)"
        failure: dict[str, object] = {"kind": "outcome_lost", "message": reason}
        return [failed_episode(event, failure) for event in registered if event.episode_uuid in archived]

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """Episodes unknown to the server are registered first, so that they end in both records.

        No client can claim them meanwhile: the engine is still booting.
        """
        known = await self._link.recorded_outcomes([event.episode_uuid for event in registered])
        unknown = [_new(event, b"{}") for event in registered if event.episode_uuid not in known]
        await self._link.register(unknown)
        self.cancel([event.episode_uuid for event in registered], reason)

    async def flush(self) -> None:
        await self._link.flush()

    def set_status(self, **changed: Any) -> None:
        self._link.set_status(**changed)

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        self._link.set_batch(batch, at_once=at_once)


def _new(episode: PlannedEpisode | EpisodeRegistered, payload: bytes, group_size: int = 0) -> NewEpisode:
    return NewEpisode(
        episode_uuid=episode.episode_uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        payload=payload,
        group_size=group_size,
    )


def failed_episode(episode: PlannedEpisode | EpisodeRegistered, failure: dict[str, object]) -> EpisodeFailed:
    """The outcome of an episode that failed once, for this reason."""
    return EpisodeFailed(
        episode_uuid=episode.episode_uuid,
        failures=[failure],
        episode_type=episode.episode_type,
        group_id=episode.group_id,
    )
