"""Greedy sampling with Tinker's SDK. A module of its own, so that a spawned process imports little else."""

from __future__ import annotations

from typing import Any

import tinker


def greedy(client: Any, ids: list[int], count: int = 8) -> list[int]:
    """The most likely continuation of `ids`."""
    params = tinker.SamplingParams(max_tokens=count, temperature=0.0, stop=[])
    return client.sample(tinker.ModelInput.from_ints(ids), 1, params).result().sequences[0].tokens


def put_greedy(queue: Any, client: Any, ids: list[int]) -> None:
    """`greedy`, into a queue between processes."""
    queue.put(greedy(client, ids))
