"""Runs whose calls are rewarded one by one, and runs whose groups a judge rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outside_chat import Message, scripted_chat
from plain_sums import SUMS
from run_ledger import ask
from short_runs import curve, short_run
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import Use
from tinkerscript.page.episode_view import episode_view, recorded_sequences
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

SIX_SUMS = f"{Path(__file__).parents[2] / 'examples' / 'six_sums.py'}:SixSums"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_turns_after_the_one_that_earned_have_no_advantage(tmp_path: Path) -> None:
    """From the program's reward of its second call to the advantages of the loss."""
    training = {"steps": 1, "groups_per_step": 2, "group_size": 4, "credit": {"level": "turn"}}
    task = {"name": SIX_SUMS, "train_args": {"size": 50}}
    config = short_run(tmp_path / "run", task=task, training=training)
    await run_training(config, QuietReporter())
    ledger, trained = LedgerReader(tmp_path / "run"), 0
    for (uuid,) in ask(tmp_path / "run", "SELECT uuid FROM episodes"):
        view = episode_view("run", ledger, uuid)
        assert [turn.reward for turn in view.turns] == [None, view.line.reward, None, None, None, None]
        if view.line.outcome != Use.TRAINED:
            continue
        trained += 1
        found = recorded_sequences(ledger, uuid)
        assert found is not None
        (sequence,), steps = found
        used = sequence.used_in(steps[1])
        assert used is not None
        values = np.frombuffer(used.advantages, "<f4")
        assert view.line.advantage is not None
        first_two = sum(len(segment.call.sampled) // 4 for segment in sequence.rollout.segments[:2])
        np.testing.assert_allclose(values[:first_two], view.line.advantage, rtol=1e-6)
        assert not values[first_two:].any()
    assert trained


def first_is_best(messages: list[Message]) -> str:
    number = str(messages[-1]["content"]).count("<attempt number=")
    scores = [{"attempt": n, "why": f"place {n}", "score": 1 / n} for n in range(1, number + 1)]
    return json.dumps({"scores": scores})


async def test_an_outside_role_ranks_groups_without_labels(tmp_path: Path) -> None:
    async with scripted_chat(first_is_best) as server:
        roles = {"judge": {"kind": "outside", "base_url": server.url, "model": "ranker"}}
        training: dict[str, Any] = {"steps": 1, "groups_per_step": 2, "group_size": 3}
        config = short_run(
            tmp_path / "run",
            task=SUMS,
            roles=roles,
            training=training | {"judge": {"role": "judge", "rubric": "Be brief."}},
        )
        await run_training(config, QuietReporter())
    assert len(server.asked) == 2
    ledger = LedgerReader(tmp_path / "run")
    for (uuid,) in ask(tmp_path / "run", "SELECT uuid FROM episodes"):
        verdict = episode_view("run", ledger, uuid).verdict
        assert verdict is not None
        assert (verdict.reward, verdict.words) in [(1 / n, f"place {n}") for n in (1, 2, 3)]
    (line,) = curve(tmp_path / "run")
    assert line["reward/mean"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert line["train/sequences"] == 6
