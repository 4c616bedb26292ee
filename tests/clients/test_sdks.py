"""The SDKs of OpenAI and Anthropic, unchanged but for base URL and key."""

from __future__ import annotations

import pytest
from player import Players
from playing import cases, check_row, play
from roster import SDKS, Client
from stage import Stage


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("client", "feature"), cases(SDKS))
async def test_feature(stage: Stage, players: Players, client: Client, feature: str) -> None:
    await play(stage, players, client, feature)


@pytest.mark.parametrize("client", SDKS, ids=lambda client: client.key)
def test_the_page_says_what_was_found(client: Client) -> None:
    check_row(client)
