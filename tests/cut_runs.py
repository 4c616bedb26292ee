"""Runs that are cut in the middle."""

from __future__ import annotations

from tinkerscript.testing import QuietReporter


class CutError(Exception):
    """The run ends here."""


class Cut(QuietReporter):
    """Ends the run when so many episodes have ended."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def advance(self, episodes: int) -> None:
        super().advance(episodes)
        if self.episodes >= self._after:
            raise CutError
