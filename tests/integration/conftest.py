"""Keeps what tinker's SDK leaves behind out of other tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from wire_setup import SDK_LEAVES_SOCKETS


@pytest.fixture(autouse=True, scope="module")
def _sockets_of_the_sdk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collected while the warnings about them are ignored, and not in the middle of some later test."""
    yield
    if SDK_LEAVES_SOCKETS.mark in request.node.iter_markers():
        gc.collect()
