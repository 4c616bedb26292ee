"""docs/training.md names every setting of training, with the default that the config has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tinkerscript.config import EvaluationConfig, MetricsConfig, ReplayConfig, SftConfig, TrainingConfig

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "section", [TrainingConfig, ReplayConfig, SftConfig, EvaluationConfig, MetricsConfig]
)
def test_every_key_has_a_row_with_its_default(section: type[BaseModel]) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", PAGE, flags=re.MULTILINE))
    made = section()
    defaults = {key: getattr(made, key) for key in section.model_fields}
    defaults = {key: value for key, value in defaults.items() if not isinstance(value, BaseModel)}
    assert {key: str(value) for key, value in defaults.items()} == {key: rows.get(key) for key in defaults}
