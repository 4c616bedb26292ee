from __future__ import annotations

import time


class Occupancy:
    """Integrates a number over time: 3 calls running for 2 s add 6 s."""

    def __init__(self) -> None:
        self._number, self._seconds, self._since = 0.0, 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self._seconds + self._number * (time.monotonic() - self._since)

    @property
    def number(self) -> float:
        return self._number

    @number.setter
    def number(self, number: float) -> None:
        self._seconds, self._since = self.seconds, time.monotonic()
        self._number = number
