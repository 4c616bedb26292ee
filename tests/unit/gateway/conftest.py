"""A gateway for the tests of its endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_bench import CLAIM, Bench


@pytest.fixture
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(byte_model)
    yield bench
    await bench.client.aclose()


@pytest.fixture
def lose_claim(bench: Bench) -> None:
    """The claim is lost while the sampler samples."""

    def lose(prompt: list[int]) -> str:
        bench.claims.lose(CLAIM, "the lease ran out")
        return "late"

    bench.answer = lose
