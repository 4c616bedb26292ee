"""`Quarantine`: clients whose attempts only fail get one episode a second, and none for a while once others
succeed.

A broken client fails at once and claims again, so that it uses up the attempts of more episodes than any
client that works. Invariant: who fails because the task, the model or the weights fail for everybody is not
quarantined; such a run ends by itself (`NoSuccessError`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

CHANCE = 1e-6
"""A client is quarantined for failures in a row that are less likely than this at the rate of the others."""

MIN_FAILURES = 8
"""So many in a row at least."""

PACE_S = 1.0
"""Seconds between the claims of a client that has failed `MIN_FAILURES` times in a row. The others may be at
their start."""

MAX_WATCHED = 10_000
"""Clients with failures in a row that are remembered; the one that began first is forgotten for a new one."""


MAX_MESSAGE_CHARS = 300


@dataclass(slots=True)
class Streak:
    """A client's failures since its last result."""

    succeeded_before: int
    failed_before: int
    """Attempts of all clients that had ended before the first of these failures."""

    failures: int = 0
    until: float = -math.inf
    """When its quarantine ends, on the clock."""

    next_claim: float = -math.inf
    """When it may claim again, on the clock."""

    message: str = ""
    """Of the last failure."""


class Quarantine:
    """Who gets no episodes, and why. A client has one or more names: its uuid's, its account's."""

    def __init__(self, clock: Callable[[], float], *, quarantine_s: float) -> None:
        """`quarantine_s`: how long; 0 for never."""
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._succeeded = self._failed = 0
        self.streaks: dict[str, Streak] = {}
        """Name -> its failures, in the order of their first. While it is empty, results count for nothing."""

    def succeeded(self, names: Iterable[str]) -> None:
        """An attempt of the client with these names ended with a result."""
        self._succeeded += 1
        for name in names:
            self.streaks.pop(name, None)

    def failed(self, names: Iterable[str], message: str) -> list[str]:
        """An attempt of the client with these names failed; returns the names that this quarantines."""
        caught = list[str]()
        for name in names:
            streak = self.streaks.get(name)
            if streak is None:
                if len(self.streaks) >= MAX_WATCHED:
                    del self.streaks[next(iter(self.streaks))]
                streak = self.streaks[name] = Streak(self._succeeded, self._failed)
            streak.failures += 1
            streak.message = _shown(message)
            if self._quarantine_s and self._is_no_accident(streak):
                if streak.until <= self._clock():
                    caught.append(name)
                streak.until = self._clock() + self._quarantine_s
        self._failed += 1
        return caught

    def _is_no_accident(self, streak: Streak) -> bool:
        """Whether the others' rate of success since the first failure does not explain the failures."""
        succeeded = self._succeeded - streak.succeeded_before
        failed = self._failed - streak.failed_before - (streak.failures - 1)
        rate = succeeded / (succeeded + failed + 1)
        return streak.failures >= MIN_FAILURES and (1 - rate) ** streak.failures < CHANCE

    def is_paced(self, names: Iterable[str]) -> bool:
        """Whether the client with these names gets one episode at a time."""
        return any(self._failed_often(name) is not None for name in names)

    def too_soon(self, names: Iterable[str]) -> str:
        """Why the client with these names has to wait for its next claim; empty if it has not."""
        for name in names:
            streak = self._failed_often(name)
            if streak is not None and streak.next_claim > self._clock():
                return (
                    f"The last {streak.failures} attempts of {name} failed; until one succeeds, it gets one "
                    f"episode in {PACE_S:g} s. The last failure: {streak.message}"
                )
        return ""

    def claimed(self, names: Iterable[str]) -> None:
        """The client with these names got an episode."""
        for name in names:
            if (streak := self._failed_often(name)) is not None:
                streak.next_claim = self._clock() + PACE_S

    def _failed_often(self, name: str) -> Streak | None:
        streak = self.streaks.get(name)
        return streak if streak is not None and streak.failures >= MIN_FAILURES else None

    def reasons(self) -> dict[str, str]:
        """Name -> why it is in quarantine."""
        now = self._clock()
        return {
            name: f"its last {streak.failures} attempts failed while others succeeded: {streak.message}"
            for name, streak in self.streaks.items()
            if streak.until > now
        }

    def reason(self, names: Iterable[str]) -> str:
        """Why the client with these names gets no episodes; empty if it does."""
        reasons = self.reasons() if self.streaks else {}
        return next((f"{name} is in quarantine: {reasons[name]}" for name in names if name in reasons), "")


def _shown(message: str) -> str:
    """A client's text on one line."""
    printable = "".join(char if char.isprintable() else " " for char in message[: 2 * MAX_MESSAGE_CHARS])
    return " ".join(printable.split())[:MAX_MESSAGE_CHARS]
