"""A run that is cut anywhere and resumed has the curve of one that was not."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plain_sums import SUMS
from run_ledger import ask, rows, standing_steps
from short_runs import Cut, CutError, curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import Phase
from tinkerscript.ledger.rows import CheckpointRow, EvaluationRow, ResumptionRow, StepRow, TrainedRow, Use
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

STEPS, GROUPS, SIZE = 6, 4, 4


def config(folder: Path) -> RunConfig:
    """It remembers groups to replay, the weight of the entropy bonus, and a reference that is older than the
    checkpoints kept without it."""
    training = {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "minibatches": 2}
    training |= {"learning_rate": 5e-4, "checkpoint_every": 1, "keep_checkpoints": 1, "replay_uses": 2}
    training |= {"kl_reference_every": 3, "loss_config": {"kl_k3": 0.1}}
    training |= {"adaptive_entropy": {"target": 9.0, "delta": 0.01}}
    return short_run(folder, seed=5, task=SUMS, training=training, workers={"concurrency": 3})


def episodes(folder: Path, step: int) -> list[tuple[Any, ...]]:
    packed = folder / "rollouts" / f"step_{step:04d}.jsonl.gz"
    lines = gzip.decompress(packed.read_bytes()).splitlines()
    found = [json.loads(line) for line in lines]
    return sorted((e["reward"], e["sequences"][0]["text"]) for e in found)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class CutAfterStep(QuietReporter):
    """Ends the run in the middle of the step after this one."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step
        self._last = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        self._last = step

    def advance(self, episodes: int) -> None:
        super().advance(episodes)
        if self._last == self._step:
            raise CutError


async def test_a_run_that_is_cut_three_times_has_the_same_curve(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await run_training(config(whole), QuietReporter())
    # Before the first checkpoint, in the middle, and where the reference is older than the checkpoint.
    for number, watcher in enumerate((Cut(after=GROUPS * SIZE // 2), CutAfterStep(2), CutAfterStep(5))):
        with pytest.raises(CutError):
            await run_training(config(cut), watcher, path=cut if number else None)
    resumed = QuietReporter()
    await run_training(config(cut), resumed, path=cut)
    assert "the weights of step 3, the KL reference" in resumed.waits

    assert [line["step"] for line in curve(cut)] == list(range(1, STEPS + 1))
    names = ("loss", "grad_norm", "learning_rate", "sequences", "kl_start", "entropy_weight")
    for one, other in zip(curve(whole), curve(cut), strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        for name in (*(f"train/{each}" for each in names), "lag/1"):
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-4, rel=1e-3), name
        assert episodes(whole, int(one["step"])) == episodes(cut, int(one["step"]))
    assert curve(whole)[-1]["train/entropy_weight"] == pytest.approx(0.05)
    moved = [abs(line["train/kl_start"]) for line in curve(whole)]
    assert moved[0] < 1e-4 < min(moved[2], moved[5])

    resumptions = rows(cut, ResumptionRow, "ORDER BY resumption")
    assert [row.step for row in resumptions] == [0, 0, 2, 5]
    assert standing_steps(cut) == [*range(1, STEPS + 1)]
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


async def test_an_evaluation_that_was_cut_is_made_and_a_finished_one_is_not_made_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    training = {"steps": 2, "groups_per_step": 1, "group_size": 2, "checkpoint_every": 1}
    evaluation = {"episodes": 1, "every_steps": 1, "interim_episodes": 1}
    made = short_run(path, task=SUMS, training=training, evaluation=evaluation)
    with pytest.raises(CutError):
        await run_training(made, CutIn("evaluation after"))
    await run_training(made, QuietReporter(), path=path)
    labels = [row.label for row in rows(path, EvaluationRow, "ORDER BY time")]
    assert labels == ["before", "step-1", "after"]
    assert [line["step"] for line in curve(path) if "eval/step-1" in line] == [1]


async def test_evaluations_that_ran_beside_later_steps_are_made_again_by_their_own_weights(
    tmp_path: Path,
) -> None:
    """And the moments of rewards and the mean of each sample are remembered."""

    def made(folder: Path) -> RunConfig:
        training = {"steps": 3, "groups_per_step": GROUPS, "group_size": SIZE, "learning_rate": 5e-4}
        training |= {"advantage_baseline": "sample_mean", "advantage_scale": "running_deviation"}
        sections: dict[str, Any] = {"training": training, "task": SUMS | {"train_args": {"number": 5}}}
        sections["evaluation"] = {"episodes": 0, "every_steps": 1, "interim_episodes": 30}
        return short_run(folder, seed=5, **sections, workers={"concurrency": 3})

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await run_training(made(whole), QuietReporter())
    with pytest.raises(CutError):
        await run_training(made(cut), Cut(after=5 * GROUPS * SIZE // 2))
    assert rows(cut, EvaluationRow) == [], "none is over before the third step has its episodes"
    resumed = QuietReporter()
    await run_training(made(cut), resumed, path=cut)
    assert rows(cut, ResumptionRow, "ORDER BY resumption")[-1].step == 2
    assert "the weights of step 1, for its evaluation" in resumed.waits

    def scores(folder: Path) -> dict[str, tuple[int, float | None, int]]:
        found = rows(folder, EvaluationRow, "WHERE undone = 0")
        return {row.label: (row.step, row.score, row.accepted) for row in found}

    assert scores(cut) == scores(whole)
    assert {label: accepted for label, (_, _, accepted) in scores(cut).items()} == {
        f"step-{step}": 30 for step in (1, 2)
    }
    for one, other in zip(by_step(whole), by_step(cut), strict=True):
        assert one["reward/mean"] == other["reward/mean"]
    last = [
        msgspec.json.decode(rows(each, CheckpointRow, "ORDER BY step DESC")[0].learners)
        for each in (whole, cut)
    ]
    assert last[0] == last[1]
    assert len(last[0][""]["samples"]) == 5, "every sample was asked twice or more"
    versions = ask(
        cut,
        "SELECT e.label, count(DISTINCT c.policy_version), count(DISTINCT c.last_version), min(p.step), "
        "min(v.policy_version = c.policy_version) FROM calls AS c "
        "JOIN episodes AS e ON e.sequence = c.episode "
        "JOIN publications AS p ON p.policy_version = c.policy_version "
        "JOIN evaluations AS v ON v.label = e.label "
        "WHERE e.label != '' AND e.undone = 0 GROUP BY e.label ORDER BY e.label",
    )
    assert versions == [(f"step-{step}", 1, 1, step, 1) for step in (1, 2)]
    used = rows(cut, TrainedRow, "WHERE undone = 0 AND outcome = ?", Use.EVALUATED)
    assert len({row.episode for row in used}) == len(used) == 2 * 30
    assert ask(cut, "SELECT count(*) FROM episodes WHERE end_number IS NULL OR NOT consumed") == [(0,)]


def by_step(folder: Path) -> list[dict[str, float]]:
    """The lines of training steps."""
    return [line for line in curve(folder) if "reward/mean" in line]
