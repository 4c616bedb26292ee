"""docs/training.md names settings that exist; docs/config.md alone says what they are by default."""

from __future__ import annotations

import re
from pathlib import Path

from tinkerscript.config import TrainingConfig

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_choices_are_settings() -> None:
    table = PAGE.partition("## Where the choices come from")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)}
    assert {"group_size", "replay_uses", "loss_mean"} <= named <= TrainingConfig.model_fields.keys()
