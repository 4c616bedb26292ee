"""Two policies that train in one run, a proposer and a solver: each on its own tokens, also after a kill."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file

from command_line import start
from interchange_helpers import eventually
from run_ledger import results, rows
from short_runs import curve, short_run
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.errors import ConfigError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import CheckpointRow, ResumptionRow, TrainedRow, Use
from tinkerscript.model_folder import model_folder
from tinkerscript.page.episode_view import episode_view
from tinkerscript.page.token_view import token_view
from tinkerscript.testing import QuietReporter
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.run import run_training

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 3
ROLE = "proposer"


def config(folder: Path, **changes: Any) -> RunConfig:
    training: dict[str, Any] = {"steps": STEPS, "groups_per_step": 4, "group_size": 4, "learning_rate": 1e-3}
    return short_run(
        folder,
        networked=True,
        seed=3,
        task={"train_args": {"split": "train"}, "eval_args": {"split": "test"}},
        sampling={"max_tokens": 8},
        **{
            "roles": {ROLE: {"kind": "trained", "learning_rate": 2e-3}},
            "training": training | {"checkpoint_every": 1, "keep_checkpoints": 2},
            "evaluation": {"episodes": 4},
            "workers": {"script": str(EXAMPLES / "proposer_solver.py")},
            **changes,
        },
    )


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [found for found in curve(folder) if "train/sequences" in found]


def weights(folder: Path, role: str) -> dict[str, Any]:
    """Of the run's last checkpoint of a role, or of its own policy."""
    checkpoints = folder / "checkpoints"
    return load_file((checkpoints / "roles" / role if role else checkpoints) / "final" / "model.safetensors")


async def killed_after(step: int, made: RunConfig, folder: Path) -> None:
    """Run a trainer of its own and kill it when `step` has its checkpoints."""

    async def reached() -> bool:
        is_there = (folder / "checkpoints" / f"step_{step:04d}").exists()
        return is_there and any(row.step == step for row in rows(folder, CheckpointRow))

    path = folder.with_suffix(".yaml")
    path.write_text(dump_config(made), encoding="utf-8")
    trainer = start(folder.parent, "train", str(path), output="trainer.log").process
    try:
        await eventually(reached, "the checkpoint", deadline_s=180)
    finally:
        trainer.kill()
        await asyncio.to_thread(trainer.wait)


@pytest.mark.timeout(400)
async def test_two_policies_train_each_on_its_own_tokens_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await killed_after(1, config(cut), cut)
    texts: dict[int, list[str]] = {}
    tokenizer = LightTokenizer(model_folder("tiny"))
    original = EmbeddedTrainingClient.forward_backward

    def seen(self: EmbeddedTrainingClient, data: list[tinker.Datum], *rest: Any, **more: Any) -> Any:
        for datum in data:
            targets = datum.loss_fn_inputs["target_tokens"].tolist()
            text = tokenizer.decode([*datum.model_input.to_ints()[:1], *targets])
            texts.setdefault(id(self), []).append(text)
        return original(self, data, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedTrainingClient, "forward_backward", seen)
        folder = await run_training(config(whole), QuietReporter())
    # Each client's data are of one role, and every one of its calls is there once.
    kinds = sorted({text.partition("user\n")[2][:4] for text in found} for found in texts.values())
    assert kinds == [{"Pick"}, {"What"}] or kinds == [{"What"}, {"Pick"}]
    accepted = results(whole)
    trained = [e for e in accepted if e.episode_type == "train"]
    assert len(trained) == 4 * 4 * STEPS
    assert {tuple(call.role for call in e.all_calls) for e in accepted} == {(ROLE, "")}
    assert {v for e in trained for call in e.all_calls for v in call.policy_versions} == set(range(STEPS))
    steps = steps_of(whole)
    for found, name in ((texts, "train/sequences"), (texts, f"role/{ROLE}/train/sequences")):
        assert sum(step[name] for step in steps) in map(len, found.values())

    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["episodes_lost"] == 0
    assert 0 < summary["max_abs_dlogp"] < 1e-4
    assert 0 < summary["roles"][ROLE]["max_abs_dlogp"] < 1e-4
    assert summary["roles"][ROLE]["alignment"][0].startswith("clean")
    assert summary["roles"][ROLE]["eval_before"] is not None
    rates = {step["train/learning_rate"] / step[f"role/{ROLE}/train/learning_rate"] for step in steps}
    assert rates == {0.5}
    check_page(whole, trained[-1].episode_uuid)

    # Checkpoints apart, of the same steps; the weights differ.
    checkpoints = whole / "checkpoints"
    names = {"final", f"step_{STEPS - 1:04d}", f"step_{STEPS:04d}"}
    assert {path.name for path in checkpoints.iterdir()} == {*names, "roles"}
    assert {path.name for path in (checkpoints / "roles" / ROLE).iterdir()} == names
    mine, theirs = (
        load_file(path / "final" / "model.safetensors")
        for path in (checkpoints, checkpoints / "roles" / ROLE)
    )
    assert mine.keys() == theirs.keys()
    assert any(np.abs(mine[name] - theirs[name]).max() > 1e-4 for name in mine)

    # The run that was killed goes on with both policies, and ends where the other one did.
    await run_training(config(cut), QuietReporter(), path=cut)
    assert [step["step"] for step in steps_of(cut)] == list(range(1, STEPS + 1))
    for one, other in zip(steps_of(whole), steps_of(cut), strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "train/sequences"):
            for each in (name, f"role/{ROLE}/{name}"):
                assert one.get(each) == pytest.approx(other.get(each), abs=1e-4, rel=1e-3), (
                    one["step"],
                    each,
                )
    for role in ("", f"roles/{ROLE}"):
        one, other = (
            load_file(run / "checkpoints" / role / "final" / "model.safetensors") for run in (whole, cut)
        )
        for name in one:
            np.testing.assert_allclose(one[name], other[name], atol=1e-4)
    assert [row.step for row in rows(cut, ResumptionRow)] == [0, 1]
    for run in (whole, cut):
        used = rows(run, TrainedRow, "WHERE undone = 0 AND outcome = ?", Use.TRAINED)
        assert {(row.step, row.role) for row in used} == {
            (step, role) for step in range(1, STEPS + 1) for role in ("", ROLE)
        }

    # A role that the checkpoint knows nothing of is not begun anew in silence.
    more = config(cut, roles={ROLE: {"kind": "trained"}, "critic": {"kind": "trained"}})
    with pytest.raises(ConfigError, match=r"roles\.critic: the run's checkpoint of step 3 has no weights"):
        await run_training(more, QuietReporter(), path=cut)


def check_page(folder: Path, uuid: str) -> None:
    """The episode's page shows whose sequences trained."""
    ledger = LedgerReader(folder)
    view = episode_view("run", ledger, uuid)
    assert [(turn.role, turn.sequence) for turn in view.turns] == [(ROLE, 1), ("", 0)]
    assert [(line.role, line.number) for line in view.sequences] == [("", 0), (ROLE, 1)]
    for line in view.sequences:
        tokens = token_view(ledger, uuid, line.number)
        assert tokens.trainer_logprobs is None or tokens.step == STEPS
        text = "".join(tokens.texts)
        assert ("Pick a number" in text) == (line.role == ROLE)
