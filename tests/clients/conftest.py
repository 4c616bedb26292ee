"""The stage and the players of a session: a feature is an episode, not a process."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from player import START_S, Player, open_player
from roster import CLIENTS, Client
from stage import Stage, open_stage

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-clients"
"""Where `make acceptance` installs the clients; CLIENTS_ENVIRONMENT names another folder."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("stage"), seed=1) as opened:
        yield opened


class Players:
    """Starts each client's program once; the next one loads its library while this one plays."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._environment = Path(os.environ.get("CLIENTS_ENVIRONMENT", ENVIRONMENT))
        self._started: dict[str, Player] = {}
        self._ready: set[str] = set()

    async def get(self, client: Client) -> Player:
        player = await self._start(client)
        if client.program not in self._ready:
            await player.line(START_S)
            self._ready.add(client.program)
        rest = CLIENTS[CLIENTS.index(client) :]
        if other := next((each for each in rest if each.program not in self._started), None):
            await self._start(other)
        return player

    async def _start(self, client: Client) -> Player:
        if client.program not in self._started:
            python = Path(sys.executable) if client.uses_project else self._environment / "bin" / "python"
            assert python.exists(), f"{python} does not exist; run `make {ENVIRONMENT.name}/.installed`"
            folder = self._folder / client.program
            folder.mkdir()
            opened = open_player(python, client.program, folder)
            self._started[client.program] = await self._stack.enter_async_context(opened)
        return self._started[client.program]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def players(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Players]:
    async with AsyncExitStack() as stack:
        yield Players(tmp_path_factory.mktemp("players"), stack)
