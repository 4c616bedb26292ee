from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from written_run import WrittenRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WrittenRun]:
    """A run without an episode."""
    with WrittenRun(tmp_path / "run") as run:
        yield run
