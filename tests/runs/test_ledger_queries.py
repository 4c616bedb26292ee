"""docs/ledger.md: its tables are the ledger's, and its queries answer on a real run."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tinkerscript.config import RunConfig
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.rows import TABLES
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"\*\*(.+?)[\*,:].*?```sql\n(.*?)```", DOCS, re.DOTALL)
EMPTY = {"Which clients fail"}
"""Questions that have no answer where nothing failed."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    config = RunConfig.model_validate(
        {
            "enable_tinkerscript_mode": False,
            "experiment_dir": str(folder),
            "task": {"name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic"},
            "training": {"steps": 2, "groups_per_step": 8, "group_size": 4},
            "evaluation": {"episodes": 20},
        }
    )
    asyncio.run(run_training(config, QuietReporter()))
    return folder / LEDGER_FILE


def test_there_are_the_queries_that_people_ask_for() -> None:
    assert len(QUERIES) >= 10


@pytest.mark.parametrize(("question", "query"), QUERIES)
def test_a_query_of_the_docs_answers(ledger: Path, question: str, query: str) -> None:
    with closing(sqlite3.connect(ledger)) as run:
        found = run.execute(query).fetchall()
    assert found or question in EMPTY


def test_every_table_is_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE))
    assert {kind.TABLE for kind in TABLES} <= documented
