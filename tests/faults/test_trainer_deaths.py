"""The trainer, and with it the server of one process, dies between any two things that a step writes: the run
that goes on has the curve of one that never died, and each step and version is in the ledger once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import dying_trainer
import pytest
from dying_trainer import DEAD, POINTS

from forked import Forked
from short_runs import curve
from tinkerscript.files import LEDGER_FILE

TRAINED_TWICE = """
SELECT episode FROM trained JOIN episodes ON episode = sequence
    WHERE trained.undone = 0 AND outcome != 'given_up' AND episode_type = 'train'
    GROUP BY episode HAVING count(*) > 1
"""
WITHOUT_TOKENS = """
SELECT episode FROM trained AS t WHERE undone = 0 AND outcome = 'trained' AND NOT EXISTS
    (SELECT 1 FROM tokens AS k WHERE k.episode = t.episode AND k.step = t.step AND undone = 0)
"""
IN_SHORT = ("after publication", "after step", "after manifest")
"""The others take as long and are tried with LONG=1."""

pytestmark = pytest.mark.xdist_group("trainer deaths")  # All are compared with one run.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert _train(folder, "") == 0
    return _rewards(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    [each if each in IN_SHORT else pytest.param(each, marks=pytest.mark.long) for each in POINTS],
)
def test_a_run_goes_on_its_curve_wherever_the_trainer_dies(
    tmp_path: Path, whole: list[float], point: str
) -> None:
    folder = tmp_path / "run"
    assert _train(folder, point) == DEAD
    assert _train(folder, "") == 0
    assert _rewards(folder) == whole
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as run:
        standing = run.execute("SELECT step FROM steps WHERE undone = 0 ORDER BY step").fetchall()
        assert standing == [(1,), (2,), (3,)]
        assert not run.execute(TRAINED_TWICE).fetchall()
        assert not run.execute(WITHOUT_TOKENS).fetchall()
        published = run.execute("SELECT policy_version FROM publications ORDER BY time").fetchall()
        versions = [version for (version,) in published]
        assert versions == sorted(set(versions))


def _train(folder: Path, point: str) -> int:
    log = folder.with_name("log.txt")
    code = Forked(dying_trainer.main, (folder, point), cwd=folder.parent, output=log).wait()
    assert code in (0, DEAD), log.read_text()
    return code


def _rewards(folder: Path) -> list[float]:
    return [line["reward/mean"] for line in curve(folder)]
