"""A server with a trainer; and what tinker's SDK leaves behind is kept out of other tests."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from fake_exchange import Exchange

from interchange_setup import Setup, serving
from serving import serving as http_serving
from wire_setup import sockets_of_the_sdk as sockets_of_the_sdk


@pytest.fixture
async def setup(tmp_path: Path, byte_model: Path) -> AsyncGenerator[Setup]:
    async with serving(tmp_path, byte_model) as made:
        yield made


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(episodes=3)


@pytest.fixture
def url(exchange: Exchange, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    caplog.set_level(logging.CRITICAL, logger="uvicorn.error")
    with http_serving(exchange) as url:  # type: ignore[arg-type]
        yield url
