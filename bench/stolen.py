"""Notes when a processor stood still: the host of a virtual machine had given it to somebody else.

    python bench/stolen.py FILE CPU

A thread of real-time priority wakes each millisecond on that processor. What keeps it from waking for longer
than `NOTED_S` is nothing of this machine. Many hosts do not tell their guests, whose processes then seem to
have computed all the while. Each time becomes a line of FILE: when it began and ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.001
NOTED_S = 0.003


@dataclass(frozen=True)
class Stolen:
    """Times that the host took, in seconds of the clock, without overlaps."""

    times: list[tuple[float, float]]

    @staticmethod
    def noted_in(files: list[Path]) -> Stolen:
        """Of all processors: a thread may have run on any of them."""
        noted = sorted(
            (note["began"], note["ended"])
            for file in files
            for note in map(json.loads, file.read_text().splitlines())
        )
        times = list[tuple[float, float]]()
        for began, ended in noted:
            if times and began <= times[-1][1]:
                times[-1] = (times[-1][0], max(ended, times[-1][1]))
            else:
                times.append((began, ended))
        return Stolen(times)

    def between(self, began: float, ended: float) -> float:
        """Seconds of it."""
        return sum(max(0.0, min(ended, until) - max(began, since)) for since, until in self.times)

    def longest(self, since: float) -> float:
        """In seconds, of those that began after `since`."""
        return max((ended - began for began, ended in self.times if began > since), default=0.0)


def may_be_real_time() -> bool:
    """Whether this process' children may have real-time priority."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, parameters)
    return True


def note_stolen(path: Path, cpu: int) -> None:
    """Until the process ends. Raises PermissionError for who may not have real-time priority."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with path.open("a", buffering=1) as file:
        before = time.time()
        while True:
            time.sleep(EVERY_S)
            now = time.time()
            if now - before > NOTED_S:
                file.write(json.dumps({"began": before, "ended": now}) + "\n")
            before = now


if __name__ == "__main__":
    note_stolen(Path(sys.argv[1]), int(sys.argv[2]))
