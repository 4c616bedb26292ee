"""`make vllm` installs what these tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_server import PYTHON

from command_line import end_all


@pytest.fixture(autouse=True, scope="session")
def installed() -> None:
    assert PYTHON.exists(), "make vllm installs it"


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()
