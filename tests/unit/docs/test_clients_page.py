"""The page of clients says what the tests of the clients recorded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_written_from_the_results() -> None:
    spec = importlib.util.spec_from_file_location("clients_table", ROOT / "scripts" / "clients_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert page == module.render(), "run scripts/clients_table.py"
