"""Sums as a plain task, without Inspect: its episodes take a fraction of the processor time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample


class Sums(Task):
    """The tiny model answers about two in five of them."""

    def __init__(self, *, number: int = 300) -> None:
        self._number = number

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        pairs = [(a, b) for b in range(10, 20) for a in range(10, 50) if (b == 19) == held_out]
        return [
            {"id": f"{a}+{b}", "input": f"What is {a}+{b}?", "target": str(a + b)}
            for a, b in (pairs if held_out else pairs[: self._number])
        ]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> float:
        reply = await model.ask([{"role": "user", "content": sample["input"]}], max_tokens=8)
        return float(reply.strip() == sample["target"])


SUMS = {"name": f"{Path(__file__)}:{Sums.__name__}"}
"""The section `task` of a run's config."""
