"""Keeps what tinker's SDK and failed tests leave behind out of other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from command_line import end_all
from wire_setup import sockets_of_the_sdk as sockets_of_the_sdk


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_all()
