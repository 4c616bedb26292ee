"""What the tests found is what `docs/clients.md` says. CLIENTS_RECORD=1 records it instead."""

from __future__ import annotations

import os

import pytest
import results


def test_the_page_tells_what_was_found() -> None:
    if not results.FOUND:
        pytest.fail("run the tests of the clients before this one: pytest tests/clients")
    if os.environ.get("CLIENTS_RECORD"):
        results.record()
    recorded = results.recorded()
    for key, row in results.FOUND.items():
        assert row == recorded.get(key), f"{key} is not as recorded; run `make clients`"
