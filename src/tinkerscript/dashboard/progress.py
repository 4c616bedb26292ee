"""`ProgressReporter`: what a training run shows people. `QuietReporter` is the fake for tests and scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Phase(Protocol):
    """A batch of episodes in progress."""

    def advance(self, episodes: int) -> None: ...


class ProgressReporter(ABC):
    """Receives a run's progress; has no influence on it."""

    @abstractmethod
    def begin(self, steps: int) -> None:
        """The run has `steps` training steps."""

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


class QuietReporter(ProgressReporter):
    """Prints nothing; keeps what it receives."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[dict[str, float]] = []
        self.scores: dict[str, float] = {}
        self.episodes = 0

    def begin(self, steps: int) -> None:
        pass

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        yield self

    def advance(self, episodes: int) -> None:
        self.episodes += episodes

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        self.scores[label] = score

    def note(self, message: str) -> None:
        self.notes.append(message)
