"""The health of runs, by what real ones leave: each row is red on a run that has what it is about."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plain_sums import SUMS
from run_ledger import results, rows
from short_runs import ARITHMETIC, short_run
from tinkerscript.commands import train as command
from tinkerscript.commands.show import show_command
from tinkerscript.ledger.health import HealthRow, best_score, health_rows
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.page.overview import overview
from tinkerscript.page.steps import step_view
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from tinkerscript.trainer_link.messages import EpisodeAccepted

DEMO = f"{ARITHMETIC}@arithmetic"

TASK = """
from collections import Counter

from tinkerscript.workers.base_task import Task


class Judged(Task):
    def __init__(self, *, what=""):
        self._what, self._counts = what, Counter()

    def samples(self, *, held_out):
        return [{"id": f"s{i}", "input": f"What is {i}+1?"} for i in range(4)]

    async def rollout(self, sample, model):
        await model.ask([{"role": "user", "content": sample["input"]}])
        what, name = self._what, sample["id"]
        if what == "broken" and name == "s3":
            raise RuntimeError("this sample cannot be scored")
        self._counts[name] += 1
        if what in ("coin", "loud"):  # Every other episode of a sample: nothing can be learned.
            size = 100.0 if what == "loud" and self._counts[name] > 8 else 1.0
            return size * (self._counts[name] % 2)
        if what in ("easy", "hard") and name == "s0":  # It shows that there are other rewards.
            return float(what == "hard")
        return float(what == "easy")
"""


class Run:
    """A finished run in this process, with the tiny model."""

    def __init__(
        self,
        folder: Path,
        *,
        task: dict[str, Any] = SUMS,
        evaluated: int = 40,
        max_tokens: int = 16,
        **training: Any,
    ) -> None:
        usual = {"steps": 4, "groups_per_step": 8, "group_size": 8, "minibatches": 4, "learning_rate": 3e-4}
        self.config = short_run(
            folder / "run",
            task=task,
            sampling={"max_tokens": max_tokens},
            training=usual | training,
            evaluation={"episodes": evaluated},
        )
        self.watcher = QuietReporter()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)  # It makes runs/latest there.
            self.folder = asyncio.run(run_training(self.config, self.watcher)).path
        self.ledger = LedgerReader(self.folder)

    @property
    def rows(self) -> dict[str, HealthRow]:
        return {row.name: row for row in health_rows(self.ledger)}

    def red(self) -> dict[str, str]:
        """Name -> kind of the rows that are not good."""
        return {name: row.kind for name, row in self.rows.items() if row.kind != "good"}

    def reported(self) -> tuple[int, str]:
        """The exit code, and what the terminal says at the end."""
        console = Console(record=True, width=200)
        code = command.report(console, self.config, self.folder)
        return code, console.export_text()


def judged(folder: Path, what: str) -> dict[str, Any]:
    path = folder / "judged.py"
    path.write_text(TASK)
    return {"name": f"{path}:Judged", "train_args": {"what": what}}


TINY_STEPS: dict[str, Any] = {"steps": 2, "groups_per_step": 4, "group_size": 2, "minibatches": 1}
"""For runs whose rewards decide everything."""


def test_a_run_that_destroys_its_model_is_no_success(tmp_path: Path) -> None:
    """Its rate is a thousand times too high: after a step, the tiny model answers next to nothing."""
    task = {"name": DEMO, "train_args": {"split": "train"}, "eval_args": {"split": "test"}}
    run = Run(tmp_path, task=task, evaluated=64, learning_rate=0.01, steps=3)
    assert {"held_out", "reward", "length"} <= {name for name, kind in run.red().items() if kind == "bad"}
    assert "replies have become nearly empty" in run.rows["length"].words
    (before,) = [note for note in run.watcher.notes if "too high" in note]
    assert before.startswith("training.learning_rate: 0.01 is too high for all weights of a small model")
    told = [note for note in run.watcher.notes if note.startswith("step ") and "trained nothing" not in note]
    assert any("it fell from" in note for note in told), "while the run goes on"
    best = best_score(run.ledger)
    assert best is not None
    assert (best.label, best.step, best.last) == ("before", 0, 0.0)
    code, text = run.reported()
    assert code == command.WORSE
    assert "the model that the run started from, tiny" in text
    assert "serve" not in text.split("run folder")[1]
    assert text.splitlines()[-1].startswith("the model is worse than it was: 0.")


def test_a_run_that_learns_is_well_and_ends_with_its_model(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.red() == {}
    assert overview("r", run.ledger).health.verdict == "all well"
    code, text = run.reported()
    assert code == 0
    assert f"serve the model    tinkerscript serve --checkpoint {run.folder}/checkpoints/final" in text
    assert text.splitlines()[-1] == "health             all well"


def test_the_page_has_the_shares_that_the_calls_of_a_run_have(tmp_path: Path) -> None:
    demo = ARITHMETIC.read_text()  # Its own limit of tokens would come before the run's.
    (tmp_path / "unlimited.py").write_text(demo.replace("config=GenerateConfig(max_tokens=8),", ""))
    task = {"name": f"{tmp_path / 'unlimited.py'}@arithmetic"}
    run = Run(tmp_path, task=task, max_tokens=3, evaluated=0, steps=2, group_size=4)
    accepted = {each.sequence: each for each in results(run.folder)}
    steps: dict[int, list[EpisodeAccepted]] = {}
    for row in rows(run.folder, TrainedRow, "WHERE step > 0 AND outcome != ?", Use.EVALUATED):
        steps.setdefault(row.step, []).append(accepted[row.episode])
    calls = {step: [call for each in own for call in each.calls] for step, own in steps.items()}
    cut = {step: [call.stop_reason == "length" for call in own] for step, own in calls.items()}
    share = sum(map(sum, cut.values())) / sum(map(len, cut.values()))
    assert 0.1 < share < 1
    cut_off = run.rows["cut_off"]
    assert (cut_off.value, cut_off.kind) == (f"{share:.0%}", "bad" if share > 0.5 else "warn")
    for step, own in calls.items():
        m = step_view(run.ledger, step).metrics
        groups = {
            each.group_id: {e.reward for e in steps[step] if e.group_id == each.group_id}
            for each in steps[step]
        }
        figures = {
            "response_tokens/cut_off": sum(cut[step]) / len(own),
            "response_tokens/mean": sum(len(call.sampled) // 4 for call in own) / len(own),
            "prompt_tokens/mean": sum(len(call.new_prompt) // 4 for call in own) / len(own),
            "turns/mean": len(own) / len(steps[step]),
            "reward/mean": sum(e.reward for e in steps[step]) / len(steps[step]),
            "groups/same_reward": sum(len(each) == 1 for each in groups.values()),
            "alignment/calls": len(own),
            "alignment/truncated": sum(cut[step]),
            "alignment/ids_from/sampler": 1.0,
            "alignment/sequences_per_episode": 1.0,
        }
        assert {name: m[name] for name in figures} == pytest.approx(figures)


def test_a_run_that_trains_nothing_is_no_success_and_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path, task=judged(tmp_path, "broken"), evaluated=0, **TINY_STEPS)
    assert run.red() == {"trained": "bad", "equal": "warn", "failed": "bad"}
    assert run.rows["trained"].value == "0 of the last 2"
    assert run.rows["trained"].words == "every episode so far has the reward 0: nothing shows what is better"
    assert run.rows["failed"].value == "4 of 16 (25%)"
    code, text = run.reported()
    assert code == command.WORSE
    assert text.splitlines()[-1] == "nothing has trained: the weights are as they were (exit code 3)"
    screen = Console(record=True, width=200)
    show_command(run.folder, "", screen)
    assert "look at: failed episodes 4 of 16 (25%): they are left out of their groups" in screen.export_text()


@pytest.mark.parametrize(("what", "words"), [("hard", "too hard: groups"), ("easy", "too easy: groups")])
def test_groups_without_signal_say_whether_the_task_is_too_hard(
    tmp_path: Path, what: str, words: str
) -> None:
    run = Run(tmp_path, task=judged(tmp_path, what), evaluated=0, **TINY_STEPS)
    assert run.rows["equal"].kind == "warn"
    assert run.rows["equal"].words.startswith(words)


def test_a_model_that_forgets_how_to_answer_has_no_entropy_and_empty_replies(tmp_path: Path) -> None:
    run = Run(tmp_path, task=judged(tmp_path, "coin"), evaluated=0, groups_per_step=4, learning_rate=0.01)
    red = run.red()
    assert (red["length"], red["entropy"], red["rate"]) == ("bad", "warn", "warn")
    assert any("reply length 2.0 → 1.0" in note for note in run.watcher.notes)


def test_gradients_that_explode_are_worth_a_look(tmp_path: Path) -> None:
    training = {"steps": 2, "groups_per_step": 4, "minibatches": 1}
    run = Run(tmp_path, task=judged(tmp_path, "loud"), evaluated=0, **training)
    assert run.red() == {"gradients": "warn"}
