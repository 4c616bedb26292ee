"""Runs whose calls are rewarded one by one, and runs whose groups a judge rewards."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outside_chat import Message, scripted_chat
from run_ledger import ask, rows
from short_runs import Cut, CutError, curve, short_run
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import TrainedRow, Use, VerdictRow
from tinkerscript.page.episode_view import episode_view, recorded_sequences
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

SIX_SUMS = f"{Path(__file__).parents[2] / 'examples' / 'six_sums.py'}:SixSums"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("level", ["turn", "episode"])
async def test_turns_after_the_one_that_earned_have_no_advantage(tmp_path: Path, level: str) -> None:
    """From the program's reward of its second call to the advantages of the loss."""
    training = {"steps": 1, "groups_per_step": 4, "group_size": 4, "credit": {"level": level}}
    config = short_run(
        tmp_path / "run", task={"name": SIX_SUMS, "train_args": {"size": 50}}, training=training
    )
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
        if level == "episode":
            np.testing.assert_allclose(values, view.line.advantage, rtol=1e-6)
            continue
        first_two = sum(len(segment.call.sampled) // 4 for segment in sequence.rollout.segments[:2])
        np.testing.assert_allclose(values[:first_two], view.line.advantage, rtol=1e-6)
        assert not values[first_two:].any()
    assert trained


JUDGE = """
import os
from pathlib import Path

def judge(group):
    with Path("judged").open("a") as file:
        file.write(group.group_id + "\\n")
    assert group.payload["sample"]["input"] == group.episodes[0].messages[0]["content"]
    return [(os.urandom(1)[0] / 255, each.messages[-1]["content"]) for each in group.episodes]
"""
"""Says something else each time: a run that judged a group again would not go on as it was."""


async def test_a_cut_run_trains_on_the_verdicts_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "judging.py").write_text(JUDGE)
    training = {"steps": 4, "groups_per_step": 4, "group_size": 4, "checkpoint_every": 2, "replay_uses": 2}
    judge = {"judge": {"function": f"{tmp_path / 'judging.py'}:judge"}}
    config = short_run(tmp_path / "run", seed=5, training=training | judge)
    for number, after in enumerate((24, 20)):
        with pytest.raises(CutError):
            await run_training(config, Cut(after=after), path=tmp_path / "run" if number else None)
    await run_training(config, QuietReporter(), path=tmp_path / "run")
    assert [line["step"] for line in curve(tmp_path / "run")] == [1, 2, 3, 4]

    verdicts = {row.episode: row.reward for row in rows(tmp_path / "run", VerdictRow)}
    groups = dict(ask(tmp_path / "run", "SELECT sequence, group_id FROM episodes"))
    standing = [row for row in rows(tmp_path / "run", TrainedRow) if not row.undone]
    by_group = defaultdict[tuple[int, str], list[TrainedRow]](list)
    for row in standing:
        if row.outcome == Use.TRAINED:
            by_group[row.step, groups[row.episode]].append(row)
    assert len(by_group) > 4 * 4, "some groups trained again"
    for members in by_group.values():
        given = np.array([verdicts[row.episode] for row in members], dtype=float)
        advantages = [row.advantage for row in members]
        np.testing.assert_allclose(advantages, given - given.mean(), atol=1e-6)
    judged = (tmp_path / "judged").read_text().split()
    assert len(judged) == len(set(judged)), "no group was judged twice, also those that trained after a cut"


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


async def test_a_frozen_role_that_cannot_judge_ends_the_run_with_its_words(tmp_path: Path) -> None:
    """The tiny model, asked as a judge, writes no scores; its groups fail and nothing trains on a 0."""
    training: dict[str, Any] = {"steps": 1, "groups_per_step": 2, "group_size": 2, "judge": {"role": "judge"}}
    config = short_run(tmp_path / "run", roles={"judge": {"kind": "frozen"}}, training=training)
    with pytest.raises(
        NoSuccessError, match="judge_failed: ValueError: the judge's reply has no scores as JSON"
    ):
        await run_training(config, QuietReporter())
    assert {row.reward for row in rows(tmp_path / "run", VerdictRow)} == {None}
    assert {row.outcome for row in rows(tmp_path / "run", TrainedRow)} == {Use.SET_ASIDE}
