"""An engine for all of these tests, and nothing of its left after each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from command_line import end_all
from engine import Engine, NoEngineError, engine, fetch_if_needed, what_is_there
from inspect_tinker_bridge.containers import remove_now

for _folder in ("clients", "unit/bridge"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))
pytest.register_assert_rewrite("oracle")


def pytest_sessionstart() -> None:
    """A test's time does not include the packages' way here."""
    with suppress(NoEngineError):
        fetch_if_needed()


@pytest.fixture(scope="session", autouse=True)
def docker_engine() -> Iterator[Engine | None]:
    """Our own engine; None where one runs here already, which no test stops."""
    try:
        with engine() as own:
            yield own
            remove_now()  # It would wait a minute for an engine that has ended.
    except NoEngineError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _nothing_is_left(docker_engine: Engine | None) -> Iterator[None]:
    before = what_is_there()
    yield
    end_all()
    assert what_is_there() == before
