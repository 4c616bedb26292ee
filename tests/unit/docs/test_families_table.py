"""The table of model families says what their tests hold the engine to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_is_written_from_the_families() -> None:
    spec = importlib.util.spec_from_file_location("write_families", ROOT / "scripts" / "write_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.TARGET.read_text(encoding="utf-8")
    assert module.render() in text
    assert text == module.page(), "run scripts/write_families.py"
