"""The stage and the players, one of each for the session: a feature is an episode, not a process."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from clients import Client
from player import Player, open_player
from stage import Stage, open_stage

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("CLIENTS_ENVIRONMENT", ROOT / ".venv-clients"))
"""Where `make acceptance` installs the clients."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("stage"), seed=1) as opened:
        yield opened


class Players:
    """Starts a client's program when it is first asked for; one runs at a time."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._client: Client | None = None
        self._player: Player | None = None

    async def get(self, client: Client) -> Player:
        if self._player is None or client != self._client:
            await self._stack.aclose()
            folder = self._folder / "-".join((client.program, *client.arguments))
            folder.mkdir(exist_ok=True)
            python = Path(sys.executable) if client.uses_project else ENVIRONMENT / "bin" / "python"
            assert python.exists(), f"{python} does not exist; run `make {ENVIRONMENT.name}/.installed`"
            opened = open_player(python, client.program, client.arguments, folder)
            self._player = await self._stack.enter_async_context(opened)
            self._client = client
        return self._player


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def players(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Players]:
    async with AsyncExitStack() as stack:
        yield Players(tmp_path_factory.mktemp("players"), stack)
