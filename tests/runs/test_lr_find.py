"""`tinkerscript lr-find` on a run of the demo."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console

from plain_sums import SUMS
from short_runs import short_run
from tinkerscript.commands.lr_find import LIMIT, lr_find_command
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    training = {"steps": 1, "groups_per_step": 4, "group_size": 4, "learning_rate": 1e-4}
    await run_training(short_run(folder, seed=5, task=SUMS, training=training), QuietReporter())
    return folder


async def test_each_rate_is_tried_on_the_same_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the same weights and moments: the change is in proportion to the rate, and its divergence about to
    the square of it."""
    before = sorted(each for each in run.rglob("*") if each.is_file())
    assert await lr_find_command(run, [], Console(width=100)) == 0
    out = capsys.readouterr().out
    rows = [tuple(map(float, each)) for each in re.findall(r"│ (\S+) +│ (\S+) +│ (\S+) +│", out)]
    assert len(rows) >= 6
    for (rate, kl, ratio), (next_rate, next_kl, next_ratio) in itertools.pairwise(rows):
        assert next_rate == pytest.approx(2 * rate, rel=0.05)
        assert next_ratio == pytest.approx(2 * ratio, rel=0.1)
        assert 2 < next_kl / kl < 6
    suggested = float(re.findall(r"training\.learning_rate: (\S+) is the highest", out)[0])
    assert suggested == max(rate for rate, kl, _ in rows if kl <= LIMIT)
    assert sorted(each for each in run.rglob("*") if each.is_file()) == before, "the run is only read"
