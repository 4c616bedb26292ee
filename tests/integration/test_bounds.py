"""Every bound of `limits` is driven to its limit and beyond: the short form of `make chaos`."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bound_drivers import OF_IMAGES, SETTINGS, SHAPES, SLOW, SUMS, TOKENS, Holder, combinations, drive_sum
from interchange_setup import Setup, serving
from tinkerscript.limits import BOUNDS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, byte_model: Path) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("bounds")
    async with serving(folder, byte_model, environ=TOKENS, **SETTINGS) as setup:
        yield setup


def test_every_bound_has_a_driver() -> None:
    assert set(BOUNDS) == set(SHAPES) | set(SUMS) | OF_IMAGES
    assert not set(SHAPES) & set(SUMS)
    assert len(BOUNDS) >= 40


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_beyond_a_bound_is_refused_by_its_name(server: Setup) -> None:
    rng = random.Random(1)
    holder = Holder(server.http, rng, "holder")
    for combination in combinations(rng, 2 * len(SHAPES) + 40):
        await holder.drive(combination)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", [name for name in SUMS if name not in SLOW])
async def test_what_adds_up_beyond_a_bound_is_refused_by_its_name(server: Setup, name: str) -> None:
    await drive_sum(Holder(server.http, random.Random(name), "holder"), name)
