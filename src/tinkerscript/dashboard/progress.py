"""`ProgressReporter`: how a run reports to people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class PendingEvaluation(NamedTuple):
    label: str
    step: int  # The step that produced its weights.
    done: int  # Finished episodes.
    total: int


class Phase(Protocol):
    def advance(self, episodes: int) -> None: ...


class ProgressReporter(ABC):
    @abstractmethod
    def begin(self, steps: int, *, done: int = 0) -> None:
        """Announce `steps` training steps, of which `done` are done."""

    @abstractmethod
    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Report a wait until the context exits."""

    @abstractmethod
    def phase(self, label: str, *, total: int) -> AbstractContextManager[Phase]:
        """Report a batch until the context exits."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None: ...

    def pending(self, evaluations: Sequence[PendingEvaluation]) -> None:  # noqa: B027 (most show phases)
        """Show unfinished evaluations."""

    @abstractmethod
    def note(self, message: str) -> None:
        """Show the user a message."""


def time_left_s(steps: int, first: tuple[int, float], last: tuple[int, float], now: float) -> float | None:
    """Estimate the seconds until the last of `steps` steps ends, or None.

    `first` and `last` are steps with their end times. There is no estimate after the last step, or once a
    step takes more than twice the usual time.
    """
    pace = (last[1] - first[1]) / (last[0] - first[0])
    passed, later = now - last[1], steps - last[0] - 1
    is_unknown = later < 0 or passed > 2 * pace or (later == 0 and passed > pace)
    return None if is_unknown else later * pace + max(0.0, pace - passed)


def rate_text(per_s: float) -> str:
    """0.3, 1.4 or 84."""
    return f"{per_s:.2g}" if per_s < 9.95 else f"{per_s:.0f}"


def role_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    names = (name.split("/", 2) for name in metrics if name.startswith("role/"))
    return {role: metrics[f"role/{role}/reward/mean"] for _, role, rest in names if rest == "reward/mean"}
