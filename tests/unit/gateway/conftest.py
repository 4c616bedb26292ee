"""A gateway for the tests of its endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_bench import Bench


@pytest.fixture
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(byte_model)
    yield bench
    await bench.client.aclose()
