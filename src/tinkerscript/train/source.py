"""The seam between the training loop and whatever runs episodes.

`NetworkSource` hands them to clients through the interchange server; `InProcessSource` runs the task's
solver in this process. The loop sees outcomes either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tinkerscript.protocol import EpisodeType
from tinkerscript.train.journal import Outcome


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One episode to run: an attempt at one sample."""

    episode_type: EpisodeType
    group_id: str
    payload: dict[str, Any]
    """`task`: the task's name; `sample`: the Inspect sample as JSON."""

    episode_uuid: str = field(default_factory=lambda: uuid4().hex)


class EpisodeSource(ABC):
    """Runs episodes. An outcome is delivered until it is acknowledged, at least once."""

    @abstractmethod
    def run(self, episodes: Sequence[PlannedEpisode]) -> AsyncIterator[list[Outcome]]:
        """Run `episodes`; yields batches of outcomes until each has ended."""

    @abstractmethod
    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        """These outcomes are durable in the journal."""

    @abstractmethod
    async def flush(self) -> None:
        """Return once every acknowledgement has taken effect."""

    @abstractmethod
    async def publish(self, policy_version: int, global_step: int) -> None:
        """From now on episodes are sampled under this policy version."""
