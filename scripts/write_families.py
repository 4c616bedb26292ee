"""Writes the table of families into docs/models.md. Run it after changing tests/model_families.py.

tests/acceptance/test_families.py holds the engine to every family."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from model_families import FAMILIES, Family  # noqa: E402

TARGET = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: scripts/write_families.py -->", "<!-- end of families -->"
KEPT = {
    "full_attention": "keys and values",
    "attention": "keys and values",
    "sliding_attention": "a window",
    "chunked_attention": "a chunk",
    "linear_attention": "a state",
    "mamba": "a state",
    "conv": "a convolution",
    "hybrid": "a state, keys and values",
}


def render() -> str:
    """The table, with families that are alike in one row."""
    rows: dict[str, list[str]] = {}
    for family in FAMILIES:
        rows.setdefault(_traits(family), []).append(family.name)
    columns = (
        "decoder",
        "layers keep",
        "LoRA's targets",
        "shares prefixes",
        "replays experts",
        "vLLM samples",
    )
    lines = [f"| {' | '.join(columns)} | families |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {traits} | {'; '.join(names)} |" for traits, names in rows.items())])


def _traits(family: Family) -> str:
    kept = "; ".join(dict.fromkeys(KEPT[kind] for kind in family.kinds.kinds if kind in KEPT))
    decoder = "fused" if family.is_fused else "own forward pass"
    targets = "all" if family.targets == Family.targets else ", ".join(family.targets)
    replays = ("yes" if family.replays else "no") if family.is_mixture else "-"
    return f"{decoder} | {kept} | {targets} | {'yes' if family.shares else 'no'} | {replays} | {family.vllm}"


def page() -> str:
    """docs/models.md with the table as it should be."""
    text = TARGET.read_text(encoding="utf-8")
    return re.sub(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n{render()}\n{END}", text)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
