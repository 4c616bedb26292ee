"""Six sums in one conversation, of which only the second one's answer counts: which of six turns earned it?

    tinkerscript train examples/six_sums.yaml

A program that rewards single calls says which reply was right (`call_rewards`), and each call trains on what
it and later ones earned. With `training.credit.level: episode`, all six turns train on the sum: the same
expected gradient, with the noise of the four turns that earned nothing. `bench/credit.py` compares the two.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample

TURNS = 6
REWARDED = 1
"""Which turn earns the reward, from 0."""

OPERANDS = range(100)
HOLD_OUT_ONE_IN = 10


class SixSums(Task):
    """Each sample is six pairs of numbers; what is held out is chosen by the pair that counts."""

    def __init__(self, *, size: int = 4000, held_out_size: int = 400) -> None:
        self._sizes = (size, held_out_size)

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        rng = random.Random(int(held_out))
        found: list[dict[str, Any]] = []
        while len(found) < self._sizes[held_out]:
            pairs = [[rng.choice(OPERANDS), rng.choice(OPERANDS)] for _ in range(TURNS)]
            if is_held_out(*pairs[REWARDED]) == held_out:
                asked = " ".join(f"{a}+{b}" for a, b in pairs)
                found.append({"id": f"{len(found)}", "input": asked, "pairs": pairs})
        return found

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        messages: list[dict[str, Any]] = []
        right: list[float] = []
        pairs: Any = sample["pairs"]
        for a, b in pairs:
            messages.append({"role": "user", "content": f"What is {a}+{b}?"})
            answer = await model.ask(messages, max_tokens=8)
            messages.append({"role": "assistant", "content": answer})
            right.append(float(answer.strip() == str(a + b)))
        earned = {model.reply_ids[REWARDED]: right[REWARDED]}
        return WorkflowOutput(reward=0.0, call_rewards=earned, log_metrics={"right": sum(right) / TURNS})


def is_held_out(a: int, b: int) -> bool:
    """A fixed hash of the unordered pair, as in arithmetic.py."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % HOLD_OUT_ONE_IN == 0
