"""A run over the network on a model that is no Qwen3: the server renders by its chat template.

`tests/integration/test_other_models.py` trains several families in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from other_models import train


async def test_a_model_of_another_family_trains_over_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = {"interchange_server_port": 0}
    await train("llama3.2", tmp_path, interchange_server=server, workers={"count": 1, "concurrency": 8})
