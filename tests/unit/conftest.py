"""A ledger of each test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    opened = SqliteLedger(tmp_path / LEDGER_FILE)
    yield opened
    await opened.close()
