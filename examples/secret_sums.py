"""Sums that the model cannot compute by itself: only a tool knows the results.

    inspect eval examples/secret_sums.py --model mockllm/model

Each pair of numbers has a secret "sum". The agent, Inspect's `react()`, has to call `add` with the right
numbers and repeat the result; without the tool, one guess in 900 is right. Pairs are split as in
arithmetic.py: both orders of a pair are in the same split.
"""

from __future__ import annotations

import random
import zlib

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.tool import Tool, tool

OPERANDS = range(10, 100)
HOLD_OUT_ONE_IN = 10
SPLITS = ("train", "test")
MAX_MESSAGES = 8
"""Limit for a model that keeps calling the tool; it scores 0."""


def secret(a: int, b: int) -> int:
    """The result of a+b in this task: three digits, from a fixed hash of the ordered pair."""
    return 100 + zlib.crc32(f"secret {a}+{b}".encode()) % 900


def split_pairs(split: str) -> list[tuple[int, int]]:
    """The pairs (a, b) of a split, in a fixed shuffled order.

    Raises ValueError for a split other than "train" and "test".
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(map(repr, SPLITS))}")
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if _is_held_out(a, b) == (split == "test")]
    random.Random(0).shuffle(pairs)
    return pairs


def _is_held_out(a: int, b: int) -> bool:
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % HOLD_OUT_ONE_IN == 0


@tool
def add() -> Tool:
    """The tool that knows the results."""

    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(secret(a, b))

    return execute


@task
def secret_sums(split: str = "train") -> Task:
    """Look up a sum with the tool; `split` is "train" or "test". The score is 1 for the exact sum, else 0."""
    samples = [
        Sample(id=f"{a}+{b}", input=f"What is {a}+{b}?", target=str(secret(a, b)))
        for a, b in split_pairs(split)
    ]
    return Task(
        dataset=MemoryDataset(samples, name=f"secret-sums-{split}"),
        solver=react(prompt=None, tools=[add()], submit=False),
        scorer=exact(),
        config=GenerateConfig(max_tokens=48),
        message_limit=MAX_MESSAGES,
    )
