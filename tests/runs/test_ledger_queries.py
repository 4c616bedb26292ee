"""docs/ledger.md: its tables are the ledger's, and its queries answer on a real run."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from short_runs import short_run
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.rows import TABLES
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"\*\*(.+?)[\*,:].*?```sql\n(.*?)```", DOCS, re.DOTALL)
EMPTY = {"Which clients fail"}
"""Questions that have no answer where nothing failed."""


async def test_the_queries_of_the_docs_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = {"steps": 2, "groups_per_step": 2, "group_size": 2}
    config = short_run(tmp_path / "run", training=training, evaluation={"episodes": 2})
    await run_training(config, QuietReporter())
    with closing(sqlite3.connect(tmp_path / "run" / LEDGER_FILE)) as run:
        found = {question: run.execute(query).fetchall() for question, query in QUERIES}
    assert len(found) == len(QUERIES) >= 10
    assert {question for question, answer in found.items() if not answer} <= EMPTY


def test_every_table_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE))
    assert {kind.TABLE for kind in TABLES} <= documented
