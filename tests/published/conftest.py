"""A model that others made and published: what our own small models are too kind to show."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FETCH = Path(__file__).parents[2] / "examples" / "smollm2" / "fetch.py"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct: float32, 8,192 tokens of context, a chat template without tools."""
    return runpy.run_path(str(FETCH))["fetch"]()
