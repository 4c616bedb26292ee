"""`ProgressReporter`: what the training loop tells people. `QuietReporter` is the fake that tests use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Phase(Protocol):
    """A stretch of episodes that ends."""

    def advance(self, episodes: int) -> None: ...


class ProgressReporter(ABC):
    """Told about progress; never asked for anything."""

    @abstractmethod
    def begin(self, steps: int) -> None:
        """The run has `steps` training steps."""

    @abstractmethod
    def phase(self, label: str, *, total: int) -> AbstractContextManager[Phase]:
        """`total` episodes begin."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step ended."""

    @abstractmethod
    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        """An evaluation ended."""

    @abstractmethod
    def note(self, message: str) -> None:
        """Something that a person should know, such as a worker that was started again."""


class QuietReporter(ProgressReporter):
    """Keeps what it is told."""

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
