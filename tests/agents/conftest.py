"""The agents on the PATH, and the scripted model and the oracle of the clients' tests."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "clients"))
pytest.register_assert_rewrite("oracle", "workshop")
from workshop import Workshop, open_workshop  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def agents_on_the_path() -> None:
    folder = Path(os.environ.get("AGENTS", TESTS.parent / ".venv-agents")) / "bin"
    assert (folder / "claude").exists(), f"no agents in {folder}: run `make agents`"
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workshop(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Workshop]:
    async with open_workshop(tmp_path_factory.mktemp("workshop")) as opened:
        yield opened
