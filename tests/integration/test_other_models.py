"""A run in one process on models that are no Qwen3."""

from __future__ import annotations

from pathlib import Path

import pytest

from other_models import SHAPES, train


@pytest.mark.parametrize("name", SHAPES)
async def test_a_model_of_another_family_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await train(name, tmp_path, enable_tinkerscript_mode=False)
