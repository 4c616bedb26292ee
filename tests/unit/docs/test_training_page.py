"""docs/training.md names every setting of training, with the default that the config has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tinkerscript.config import EvaluationConfig, MetricsConfig, SftConfig, TrainingConfig

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", [TrainingConfig, SftConfig, EvaluationConfig, MetricsConfig])
def test_every_key_has_a_row_with_its_default(section: type[BaseModel]) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", PAGE, flags=re.MULTILINE))
    defaults = section().model_dump()
    assert {key: str(value) for key, value in defaults.items()} == {key: rows.get(key) for key in defaults}
