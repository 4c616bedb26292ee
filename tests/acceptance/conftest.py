"""Ends what a failed test leaves running, and runs the longest tests first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from command_line import end_all


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
