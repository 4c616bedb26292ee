"""What the tests of clusters share. `make cluster` installs what they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_cluster import MARK, VirtualCluster, left_of

from command_line import end_all


@pytest.fixture
def cluster(nothing_is_left_running: Path) -> Iterator[VirtualCluster]:
    found = VirtualCluster()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def nothing_is_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(MARK, str(tmp_path))
    yield tmp_path
    end_all()
    assert not left_of(tmp_path, "tinkerscript", within_s=60)
