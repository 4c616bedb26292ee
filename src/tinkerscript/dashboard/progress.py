"""`ProgressReporter`: what a training run shows people. `testing.QuietReporter` is the fake for tests and
scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol


class Phase(Protocol):
    """A batch of episodes in progress."""

    def advance(self, episodes: int) -> None: ...


class ProgressReporter(ABC):
    """Receives a run's progress; has no influence on it."""

    @abstractmethod
    def begin(self, steps: int, *, done: int = 0) -> None:
        """The run has `steps` training steps, of which a resumed one has `done` behind it."""

    @abstractmethod
    def waiting(self, what: str) -> AbstractContextManager[None]:
        """The run waits for `what` until the context is left."""

    @abstractmethod
    def phase(self, label: str, *, total: int) -> AbstractContextManager[Phase]:
        """`total` episodes begin; leaving the context ends the phase."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step ended."""

    @abstractmethod
    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        """An evaluation ended."""

    @abstractmethod
    def note(self, message: str) -> None:
        """A message for the user, such as that a worker was restarted."""


def role_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """By role that trains: the mean reward in a step's metrics."""
    names = (name.split("/", 2) for name in metrics if name.startswith("role/"))
    return {role: metrics[f"role/{role}/reward/mean"] for _, role, rest in names if rest == "reward/mean"}
