"""A run that is cut anywhere and resumed has the curve of one that was not."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from run_ledger import ask, rows
from short_runs import Cut, CutError, curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import Phase
from tinkerscript.ledger.rows import EvaluationRow, ResumptionRow, StepRow, TrainedRow, Use
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

STEPS, GROUPS, SIZE = 6, 4, 4


def config(folder: Path) -> RunConfig:
    training = {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "minibatches": 2}
    more = {"learning_rate": 5e-4, "checkpoint_every": 2, "replay_uses": 2}
    return short_run(folder, seed=5, training=training | more, workers={"concurrency": 3})


def episodes(folder: Path, step: int) -> list[tuple[Any, ...]]:
    lines = (folder / "rollouts" / f"step_{step:04d}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return sorted((e["reward"], e["sequences"][0]["text"]) for e in found)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_tmp_path")
async def test_a_run_that_is_cut_three_times_has_the_same_curve(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await run_training(config(whole), QuietReporter())
    moments = random.Random(8)
    for number in range(3):
        # Anywhere in the next two steps: before the first checkpoint, and in the middle of steps.
        watcher = Cut(after=moments.randrange(1, 2 * GROUPS * SIZE))
        with pytest.raises(CutError):
            await run_training(config(cut), watcher, path=cut if number else None)
    await run_training(config(cut), QuietReporter(), path=cut)

    assert [line["step"] for line in curve(cut)] == list(range(1, STEPS + 1))
    for one, other in zip(curve(whole), curve(cut), strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        for name in ("train/loss", "train/grad_norm", "train/learning_rate", "train/sequences", "lag/1"):
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-4, rel=1e-4), name
        assert episodes(whole, int(one["step"])) == episodes(cut, int(one["step"]))

    resumptions = rows(cut, ResumptionRow, "ORDER BY resumption")
    assert [row.resumption for row in resumptions] == [1, 2, 3, 4]
    assert [row.step for row in rows(cut, StepRow, "WHERE undone = 0 ORDER BY step")] == [
        *range(1, STEPS + 1)
    ]
    for row in rows(cut, StepRow, "WHERE undone != 0"):
        assert row.step > resumptions[row.undone - 1].step, "those after the checkpoint alone are undone"
    used = rows(cut, TrainedRow, "WHERE undone = 0 AND outcome != ?", Use.GIVEN_UP)
    assert len({row.episode for row in used}) == STEPS * GROUPS * SIZE
    uses = Counter(row.episode for row in used if row.place >= 0)
    assert set(uses.values()) == {1, 2}, "some episodes were replayed, none twice"
    assert sum(line["replay/groups"] for line in curve(cut)) == list(uses.values()).count(2) / SIZE
    assert all(line["alignment/lag_1/tokens_compared"] > 0 for line in curve(cut) if line["replay/groups"])
    assert ask(cut, "SELECT count(*) FROM episodes WHERE end_number IS NULL OR NOT consumed") == [(0,)]


class CutIn(QuietReporter):
    """Ends the run when the phase of this label begins."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        if label == self._label:
            raise CutError
        yield self


@pytest.mark.usefixtures("in_tmp_path")
async def test_an_evaluation_that_was_cut_is_made_and_a_finished_one_is_not_made_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    short = {"steps": 2, "groups_per_step": 1, "group_size": 2, "checkpoint_every": 1}
    data = config(path).model_dump()
    data["training"] |= short
    data["evaluation"] |= {"episodes": 1, "every_steps": 1, "interim_episodes": 1}
    made = RunConfig.model_validate(data)
    with pytest.raises(CutError):
        await run_training(made, CutIn("evaluation step-1"))
    await run_training(made, QuietReporter(), path=path)
    labels = [row.label for row in rows(path, EvaluationRow, "ORDER BY time")]
    assert labels == ["before", "step-1", "after"]
    assert [line["step"] for line in curve(path) if "eval/step-1" in line] == [1]
