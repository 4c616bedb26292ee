"""The renderer of the bridge's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinker_cookbook.renderers import Renderer

from bridge_parts import bytes_renderer


@pytest.fixture(scope="module")
def renderer(byte_model: Path) -> Renderer:
    return bytes_renderer(byte_model)
