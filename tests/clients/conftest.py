"""The stage and the players of a session: a feature is an episode, not a process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from player import Players
from stage import Stage, open_stage

pytest.register_assert_rewrite("oracle")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("stage"), seed=1) as opened:
        yield opened


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def players(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Players]:
    async with AsyncExitStack() as stack:
        yield Players(tmp_path_factory.mktemp("players"), stack)
