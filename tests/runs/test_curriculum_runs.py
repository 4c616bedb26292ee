"""Runs that choose their samples: they pass over what teaches nothing, and go on as they would have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from run_ledger import ask
from short_runs import Cut, CutError, curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

TASK = """
from tinkerscript.workers import Task

class Mixed(Task):
    \"\"\"Of ten sums, four are never right and four always are.\"\"\"

    def samples(self, *, held_out):
        return [{"id": f"{kind}{n}", "input": f"What is {n}+{n + 20}?"} for n in range(10)
                for kind in [["never", "always", "never", "always", "sum"][n % 5]]]

    async def rollout(self, sample, model):
        reply = await model.ask([{"role": "user", "content": sample["input"]}], max_tokens=4)
        a, b = sample["input"].removeprefix("What is ").rstrip("?").split("+")
        right = float(reply.strip() == str(int(a) + int(b)))
        return {"never": 0.0, "always": 1.0, "sum": right}[sample["id"].rstrip("0123456789")]
"""

STEPS, GROUPS = 6, 5


def config(folder: Path, tmp_path: Path, *, steps: int = STEPS, **more: Any) -> RunConfig:
    (tmp_path / "mixed.py").write_text(TASK)
    training = {"steps": steps, "groups_per_step": GROUPS, "group_size": 8, "checkpoint_every": 2}
    training |= {"curriculum": {"by": "pass_rate"}, "learning_rate": 1e-9}
    task = {"name": f"{tmp_path / 'mixed.py'}:Mixed"}
    return short_run(folder, task=task, seed=4, training=training, **more)


def asked(folder: Path) -> list[tuple[int, int]]:
    """Step and position of each group that stands."""
    return ask(
        folder,
        "SELECT DISTINCT step, position FROM episodes WHERE undone = 0 AND position >= 0 "
        "ORDER BY step, position",
    )


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_a_cut_run_asks_what_it_would_have_asked(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await run_training(config(whole, tmp_path), QuietReporter())
    with pytest.raises(CutError):
        await run_training(config(cut, tmp_path), Cut(after=3 * GROUPS * 8 - 5))
    await run_training(config(cut, tmp_path), QuietReporter(), path=cut)
    assert asked(cut) == asked(whole)

    kinds = Counter(
        sample.rstrip("0123456789")
        for (sample,) in ask(
            whole,
            "SELECT json_extract(CAST(s.payload AS TEXT), '$.sample.id') FROM episodes AS e "
            "JOIN samples AS s ON s.digest = e.sample WHERE e.step > 2 GROUP BY e.group_id",
        )
    )
    assert kinds["sum"] >= 0.4 * kinds.total(), "two in ten samples are sums, and all have been asked by then"
    last = curve(whole)[-1]
    assert (last["curriculum/solved"], last["curriculum/hopeless"]) == (4.0, 4.0)
    assert sum(line["curriculum/passed_over"] for line in curve(whole)) > 20


async def test_an_evaluation_of_several_attempts_has_pass_at_k(tmp_path: Path) -> None:
    evaluation = {"episodes": 32, "attempts": 4}
    await run_training(config(tmp_path / "run", tmp_path, steps=0, evaluation=evaluation), QuietReporter())
    found = dict(
        ask(tmp_path / "run", "SELECT name, value FROM metrics WHERE name LIKE 'eval/%' AND undone = 0")
    )
    assert found["eval/pass@4"] >= found["eval/pass@1"] == pytest.approx(found["eval/score"])
    ((margin,),) = ask(tmp_path / "run", "SELECT margin FROM evaluations WHERE label = 'after'")
    assert margin == pytest.approx(found["eval/pass@1_margin"]), "over samples, not over attempts"
