"""Ends what a failed test leaves running, and runs the longest tests first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import end_all
from newcomer import CONFIG, TASKS, Installation, Shell


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that may take long first, so that the processes end together; tests of one group side by side."""
    longest: dict[str, float] = {}
    for item in items:
        longest[_group(item)] = max(longest.get(_group(item), 0.0), _limit(item))
    items.sort(key=lambda item: (-longest[_group(item)], _group(item), -_limit(item)))


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return marker.args[0] if marker else item.nodeid


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """One for all of pytest's processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "installation"
    folder.mkdir(exist_ok=True)
    return Installation(folder)


@pytest.fixture
def shell(tmp_path: Path, installation: Installation) -> Shell:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return Shell(tmp_path, installation.whole())
