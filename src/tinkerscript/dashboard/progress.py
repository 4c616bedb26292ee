"""`ProgressReporter`: what a training run shows people. `testing.QuietReporter` is the fake for tests and
scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class PendingEvaluation(NamedTuple):
    """An evaluation that has begun."""

    label: str
    step: int
    """The one whose weights it scores."""

    done: int
    """Episodes that have ended."""

    total: int


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

    def pending(self, evaluations: Sequence[PendingEvaluation]) -> None:  # noqa: B027 (most show phases)
        """These evaluations have begun and not ended."""

    @abstractmethod
    def note(self, message: str) -> None:
        """A message for the user, such as that a worker was restarted."""


def time_left_s(steps: int, first: tuple[int, float], last: tuple[int, float], now: float) -> float | None:
    """Seconds until the end of the last of `steps` steps, at the pace between two that ended.

    `first` and `last` are a step and when it ended. None where nothing is known: after the last step, and
    while a step takes more than twice as long as those before it.
    """
    pace = (last[1] - first[1]) / (last[0] - first[0])
    passed, later = now - last[1], steps - last[0] - 1
    is_unknown = later < 0 or passed > 2 * pace or (later == 0 and passed > pace)
    return None if is_unknown else later * pace + max(0.0, pace - passed)


def rate_text(per_s: float) -> str:
    """Such as 0.3, 1.4 or 84."""
    return f"{per_s:.2g}" if per_s < 9.95 else f"{per_s:.0f}"


def role_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """By role that trains: the mean reward in a step's metrics."""
    names = (name.split("/", 2) for name in metrics if name.startswith("role/"))
    return {role: metrics[f"role/{role}/reward/mean"] for _, role, rest in names if rest == "reward/mean"}
