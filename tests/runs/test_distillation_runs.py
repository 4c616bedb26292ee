"""Whole runs that learn from a teacher: groups of one, a cut and a resumption, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_sums(tmp_path_factory.mktemp("teacher"))


def config(
    folder: Path, teacher: Path | str, *, engine: Any = None, size: int = 1, **distillation: Any
) -> RunConfig:
    training: dict[str, Any] = {"steps": STEPS, "groups_per_step": GROUPS // size, "group_size": size}
    training |= {"learning_rate": 5e-4, "checkpoint_every": 2}
    return short_run(
        folder,
        seed=5,
        engine=engine or {},
        roles={"teacher": {"kind": "frozen", "model": str(teacher)}},
        training=training | {"distillation": {"teacher": "teacher", **distillation}},
    )


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_groups_of_one_learn_from_a_teacher_and_a_cut_changes_nothing(
    taught: Path, tmp_path: Path
) -> None:
    whole = (await run_training(config(tmp_path / "whole", taught), QuietReporter())).path
    lines = curve(whole)
    assert [line["train/sequences"] for line in lines] == [GROUPS] * STEPS, "whatever their rewards"
    assert [line["groups/trained"] for line in lines] == [GROUPS] * STEPS
    assert [line["groups/same_reward"] for line in lines] == [0] * STEPS
    kl = [line["distillation/teacher_kl"] for line in lines]
    assert kl[0] > 0.05
    cut = tmp_path / "cut"
    with pytest.raises(CutError):
        await run_training(config(cut, taught), Cut(int(GROUPS * 2.5)))
    await run_training(config(cut, taught), QuietReporter(), path=cut)
    for one, other in zip(lines, curve(cut), strict=True):
        for name in ("reward/mean", "train/loss", "distillation/teacher_kl"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
    kept = ask(whole, "SELECT value FROM metrics WHERE name = 'distillation/teacher_kl' ORDER BY step")
    assert [value for (value,) in kept] == pytest.approx(kl)
    assert ask(whole, "SELECT DISTINCT outcome FROM trained") == [("trained",)]


async def test_an_adapter_learns_from_the_base_that_it_shares(tmp_path: Path) -> None:
    """It starts as its base, so there is nothing to learn: the first divergence is 0."""
    engine = {"lora": {"rank": 4, "targets": ["attn"]}}
    run = await run_training(config(tmp_path / "run", "tiny", engine=engine), QuietReporter())
    assert curve(run.path)[0]["distillation/teacher_kl"] == pytest.approx(0, abs=1e-5)


TOLD = """
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import Task


class Told(Task):
    def samples(self, *, held_out):
        return [{"id": str(i), "input": f"What is {i}+3?", "target": str(i + 3)} for i in range(10, 40)]

    async def rollout(self, sample, model):
        await model.ask([{"role": "user", "content": sample["input"]}], max_tokens=6)
        hint = {"teacher_context": f"It is {sample['target']}."}
        return WorkflowOutput(reward=0.0, metadata=hint)
"""


async def test_the_start_policy_teaches_what_only_it_was_told(tmp_path: Path) -> None:
    """Without the hint it would agree with the policy, as above, in the first step."""
    (tmp_path / "told.py").write_text(TOLD)
    made = config(tmp_path / "run", "")
    task = made.task.model_copy(update={"name": f"{tmp_path / 'told.py'}:Told"})
    lines = curve((await run_training(made.model_copy(update={"task": task}), QuietReporter())).path)
    assert abs(lines[0]["distillation/teacher_kl"]) > 0.01
    assert [line["train/sequences"] for line in lines] == [GROUPS] * STEPS


async def test_a_program_that_gives_the_teacher_nonsense_ends_only_its_own_episodes(tmp_path: Path) -> None:
    """What a program hands in as metadata is its own choice; every third says a number, or far too much."""
    nonsense = TOLD.replace(
        """f"It is {sample['target']}."}""",
        """[f"It is {sample['target']}.", 3, "word " * 3000][int(sample["id"]) % 3]}""",
    )
    assert nonsense != TOLD
    (tmp_path / "told.py").write_text(nonsense)
    made = config(tmp_path / "run", "", size=3)
    task = made.task.model_copy(update={"name": f"{tmp_path / 'told.py'}:Told"})
    run = await run_training(made.model_copy(update={"task": task}), QuietReporter())
    lines = curve(run.path)
    assert len(lines) == STEPS
    failures = ask(run.path, "SELECT DISTINCT reason FROM trained WHERE outcome != 'trained'")
    assert failures, "some say nonsense"


async def test_reward_and_teacher_train_together(taught: Path, tmp_path: Path) -> None:
    made = config(tmp_path / "run", taught, size=4, reward_coef=10.0)
    lines = curve((await run_training(made, QuietReporter())).path)
    assert [line["train/sequences"] for line in lines] == [GROUPS] * STEPS
    assert all("train/clip_fraction" in line for line in lines)


async def test_a_teachers_most_probable_tokens_teach(taught: Path, tmp_path: Path) -> None:
    lines = curve((await run_training(config(tmp_path / "run", taught, top_k=8), QuietReporter())).path)
    losses = [line["train/loss"] for line in lines]
    assert [line["train/sequences"] for line in lines] == [GROUPS] * STEPS
    assert 0 < losses[-1] < losses[0]


async def test_a_checkpoint_at_a_service_teaches_through_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run at the service makes the teacher, far from the start; the next one has it score every token."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with wire_server(TINY_MODEL, tmp_path / "wire", name="tiny-served") as wire:
        engine = {"backend": "tinker", "base_url": wire.url, "lora": {"rank": 8}}
        first = config(tmp_path / "first", "", engine=engine, size=4, reward_coef=1.0)
        await run_training(first, QuietReporter())
        start = curve(tmp_path / "first")[0]["distillation/teacher_kl"]
        assert start == pytest.approx(0, abs=1e-4), "its own start is the teacher"
        teacher = tmp_path / "first" / "checkpoints" / "final"
        lines = curve(
            (await run_training(config(tmp_path / "run", teacher, engine=engine), QuietReporter())).path
        )
    assert lines[0]["distillation/teacher_kl"] > 1e-3
    assert [line["train/sequences"] for line in lines] == [GROUPS] * STEPS
