from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def without_latest_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout with a run in `runs/latest` has another default for `--server`."""
    monkeypatch.chdir(tmp_path)
