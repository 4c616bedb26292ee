"""Whole runs that learn from a teacher: groups of one, a cut and a resumption, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plain_sums import SUMS
from run_ledger import ask
from short_runs import Cut, CutError, curve, short_run
from taught_model import taught_sums
from tinkerscript.config import RunConfig
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from wire_setup import KEY, SDK_LEAVES_SOCKETS, wire_server

pytestmark = SDK_LEAVES_SOCKETS

STEPS, GROUPS = 4, 12


def config(
    folder: Path,
    teacher: Path | str,
    *,
    engine: Any = None,
    task: dict[str, Any] = SUMS,
    steps: int = STEPS,
    size: int = 1,
    **distillation: Any,
) -> RunConfig:
    training: dict[str, Any] = {"steps": steps, "groups_per_step": GROUPS // size, "group_size": size}
    training |= {"learning_rate": 5e-4, "checkpoint_every": 2}
    return short_run(
        folder,
        seed=5,
        engine=engine or {},
        task=task,
        roles={"teacher": {"kind": "frozen", "model": str(teacher)}},
        training=training | {"distillation": {"teacher": "teacher", **distillation}},
    )


async def trained(made: RunConfig) -> list[dict[str, float]]:
    """The curve of a run whose episodes all trained, whatever their rewards."""
    lines = curve((await run_training(made, QuietReporter())).path)
    assert [line["train/sequences"] for line in lines] == [GROUPS] * made.training.steps
    return lines


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_groups_of_one_learn_from_a_teacher_and_a_cut_changes_nothing(tmp_path: Path) -> None:
    taught = taught_sums(tmp_path / "teacher", steps=6)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    lines = await trained(config(whole, taught))
    assert [line["groups/trained"] for line in lines] == [GROUPS] * STEPS
    assert [line["groups/same_reward"] for line in lines] == [0] * STEPS
    kl = [line["distillation/teacher_kl"] for line in lines]
    assert kl[0] > 0.05
    with pytest.raises(CutError):
        await run_training(config(cut, taught), Cut(int(GROUPS * 2.5)))
    await run_training(config(cut, taught), QuietReporter(), path=cut)
    for one, other in zip(lines, curve(cut), strict=True):
        for name in ("reward/mean", "train/loss", "distillation/teacher_kl"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
    kept = ask(whole, "SELECT value FROM metrics WHERE name = 'distillation/teacher_kl' ORDER BY step")
    assert [value for (value,) in kept] == pytest.approx(kl)
    assert ask(whole, "SELECT DISTINCT outcome FROM trained") == [("trained",)]


TOLD = """
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import Task


class Told(Task):
    def samples(self, *, held_out):
        return [{"id": str(i), "input": f"What is {i}+3?", "target": str(i + 3)} for i in range(10, 40)]

    async def rollout(self, sample, model):
        await model.ask([{"role": "user", "content": sample["input"]}], max_tokens=6)
        hint = [f"It is {sample['target']}.", 3, "word " * 3000][int(sample["id"]) % 3]
        return WorkflowOutput(reward=0.0, metadata={"teacher_context": hint})
"""


async def test_the_start_policy_teaches_what_only_it_was_told_and_nonsense_ends_its_own_episodes(
    tmp_path: Path,
) -> None:
    """What a program hands in as metadata is its own choice; of three samples one has a number, one far too
    much. Without hints teacher and policy would agree in the first step."""
    (tmp_path / "told.py").write_text(TOLD)
    made = config(tmp_path / "run", "", task={"name": f"{tmp_path / 'told.py'}:Told"}, steps=2, size=3)
    run = await run_training(made, QuietReporter())
    lines = curve(run.path)
    assert len(lines) == 2
    assert abs(lines[0]["distillation/teacher_kl"]) > 0.01
    assert ask(run.path, "SELECT DISTINCT reason FROM trained WHERE outcome != 'trained'")


async def test_a_checkpoint_at_a_service_teaches_through_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run at the service makes the teacher, far from the start; the next one has it score every token."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with wire_server(TINY_MODEL, tmp_path / "wire", name="tiny-served") as wire:
        engine = {"backend": "tinker", "base_url": wire.url, "lora": {"rank": 8}}
        made = config(tmp_path / "first", "", engine=engine, steps=2, size=4, reward_coef=1.0)
        start, _ = await trained(made)
        assert start["distillation/teacher_kl"] == pytest.approx(0, abs=1e-4), "its own start is the teacher"
        teacher = tmp_path / "first" / "checkpoints" / "final"
        (line,) = await trained(config(tmp_path / "run", teacher, engine=engine, steps=1))
    assert abs(line["distillation/teacher_kl"]) > 1e-3
