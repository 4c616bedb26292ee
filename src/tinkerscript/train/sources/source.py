"""The seam between the training loop and whatever runs episodes.

`NetworkSource` hands them to clients through the interchange server; `InProcessSource` runs the task's
solver in the trainer's process. The loop sees outcomes either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tinkerscript.protocol import EpisodeType
from tinkerscript.rollouts.call import Call
from tinkerscript.train.journal import EpisodeFailed, EpisodeRegistered, Outcome
from tinkerscript.trainer_link.messages import BatchProgress


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
    """Runs episodes. Each outcome is delivered at least once, until it is acknowledged."""

    @abstractmethod
    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        """Run these. An episode that is running already (by uuid) continues."""

    @abstractmethod
    async def outcomes(self) -> list[Outcome]:
        """Episodes that ended; waits for at least one."""

    @abstractmethod
    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        """These outcomes are durable in the journal."""

    def failed_calls(self, episode_uuid: str) -> Mapping[int, list[Call]]:
        """The calls of an episode's failed attempts, by attempt, as far as they are known; given once, after
        its outcome. They never train."""
        del episode_uuid
        return {}

    def transcripts(self, episode_uuid: str) -> Mapping[int, bytes]:
        """The transcripts of an episode's attempts, by attempt, as they were packed; given once, after its
        outcome."""
        del episode_uuid
        return {}

    own_clients = ""
    """What the `client_uuid` of each client begins with that belongs to this run."""

    @abstractmethod
    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        """Cancel episodes. Each still gets an outcome: cancelled, or the result it already had."""

    @abstractmethod
    async def lost(self, registered: Sequence[EpisodeRegistered]) -> list[EpisodeFailed]:
        """Those of a former trainer's episodes whose outcome it acknowledged, though its journal lacks it.

        Only a power cut, or a disk that lies, can take the end of a journal away.
        """

    @abstractmethod
    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """Cancel episodes of an earlier trainer: registered, or not yet registered when it died."""

    @abstractmethod
    async def flush(self) -> None:
        """Return once every acknowledgement has taken effect."""

    @abstractmethod
    def publishing(self) -> None:
        """New weights are being published: hold back new episodes."""

    @abstractmethod
    def accepts(self, policy_versions: Sequence[int]) -> None:
        """Results that other versions sampled cannot train in the batch that takes results now."""

    @abstractmethod
    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        """This batch is being filled; None: none is. `at_once`: not only when it suits."""

    @abstractmethod
    async def publish(self, policy_version: int, global_step: int) -> None:
        """Sample with this policy version from now on."""
