"""Two-digit addition as an ordinary Inspect AI task. Nothing in it is specific to training.

    inspect eval examples/arithmetic.py --model mockllm/model

The problems are all 10,000 ordered pairs of operands 0..99, split by unordered pair: 23+45 and 45+23 are
always in the same split, so no test problem is a training problem with its operands swapped.
"""

from __future__ import annotations

import random
import zlib

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

LARGEST_OPERAND = 99
HOLD_OUT_ONE_IN = 20
SPLITS = ("train", "test")


def is_held_out(a: int, b: int) -> bool:
    """Whether a+b belongs to the test split: a fixed hash of the unordered pair, one in 20."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % HOLD_OUT_ONE_IN == 0


def split_pairs(split: str) -> list[tuple[int, int]]:
    """The operand pairs (a, b) of a split, in a fixed shuffled order.

    Raises ValueError for a split other than "train" and "test".
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(map(repr, SPLITS))}")
    operands = range(LARGEST_OPERAND + 1)
    pairs = [(a, b) for a in operands for b in operands if is_held_out(a, b) == (split == "test")]
    random.Random(0).shuffle(pairs)
    return pairs


def question(a: int, b: int) -> str:
    """The prompt for a+b."""
    return f"What is {a}+{b}?"


@task
def arithmetic(split: str = "train") -> Task:
    """Add two numbers; `split` is "train" or "test". The score is 1 for exactly the sum, else 0."""
    samples = [Sample(id=f"{a}+{b}", input=question(a, b), target=str(a + b)) for a, b in split_pairs(split)]
    return Task(
        dataset=MemoryDataset(samples, name=f"arithmetic-{split}"),
        solver=generate(),
        scorer=exact(),
        config=GenerateConfig(max_tokens=8),
    )
