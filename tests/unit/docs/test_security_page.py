"""`docs/security.md`: every claim names a test, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_claim_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    parties, claims = (
        [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in part.splitlines()
            if line[:1] == "|"
        ]
        for part in page.split("## What holds")
    )
    names = {party for party, _ in parties[2:]}
    assert len(claims) > 30
    for subject, other, what, test in claims[2:]:
        assert {subject, other} <= names, what
        path, _, name = test.strip("`").partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
    assert {subject for subject, *_ in claims[2:]} >= {"stranger", "web page", "agent", "foreign run"}
