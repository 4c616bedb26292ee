"""A run over the network on models that are no Qwen3: the server renders by their chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from other_models import SHAPES, train


@pytest.mark.parametrize("name", SHAPES)
async def test_a_model_of_another_family_trains_over_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = {"interchange_server_port": 0}
    await train(name, tmp_path, interchange_server=server, workers={"count": 1, "concurrency": 8})
