"""Supervised training on chats, at both engines, and a reinforcement run that starts from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plain_sums import SUMS
from run_ledger import ask, counted_calls, dictionaries
from short_runs import curve, short_run
from tinkerscript.config import RunConfig, SftConfig
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.tokens import unpacked_sequences
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.page.steps import step_page, step_view
from tinkerscript.page.token_view import token_view
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from tinkerscript.train.sft import run_sft
from wire_setup import KEY, SDK_LEAVES_SOCKETS, wire_server

pytestmark = SDK_LEAVES_SOCKETS


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", KEY)


def config(folder: Path, engine: dict[str, Any] | None = None, **sft: Any) -> RunConfig:
    """Chats about something that the tiny model does not know: sums of two digits, said backwards."""
    chats = folder.parent / "chats.jsonl"
    with chats.open("w") as file:
        for i in range(10, 90):
            messages = [
                {"role": "user", "content": f"What is {i}+{99 - i}?"},
                {"role": "assistant", "content": f"{i + 7}"[::-1]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return RunConfig.model_validate(
        {
            "experiment_dir": str(folder),
            "method": "sft",
            "seed": 3,
            "engine": engine or {},
            "sft": {"data": str(chats), "held_out": 16, "batch_size": 16, "epochs": 2, **sft},
            "training": {"learning_rate": 2e-3, "checkpoint_every": 3, "lr_schedule": "constant"},
            "evaluation": {"every_steps": 4},
        }
    )


def logged(folder: Path, name: str) -> list[float]:
    return [line[name] for line in curve(folder) if name in line]


def check_ledger(folder: Path, nll_before: float) -> None:
    """Every chat of every step is in the ledger, with the trainer's logprobs of the tokens that train."""
    ledger = LedgerReader(folder)
    assert ledger.status()["state"] == "finished"
    assert [line.trained for line in step_page(ledger).steps] == [16] * 8
    first = step_view(ledger, 1)
    assert logged(folder, "train/nll")[0] == pytest.approx(first.metrics["train/nll"])
    (group,) = first.groups
    logprobs: list[float] = []
    for line in group.episodes:
        tokens = token_view(ledger, line.uuid, 0)
        said = "".join(text for text, trains in zip(tokens.texts, tokens.sampled, strict=True) if trains)
        asked = re.search(r"What is (\d+)\+", "".join(tokens.texts))
        assert asked
        assert said.startswith(f"{int(asked[1]) + 7}"[::-1])
        assert tokens.trainer_logprobs is not None
        logprobs += [value for value in tokens.trainer_logprobs if value is not None]
    assert -sum(logprobs) / len(logprobs) == pytest.approx(nll_before, abs=0.5)


def check_nll(folder: Path) -> list[float]:
    """It falls, at both engines alike."""
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["chats_trained"]) == (8, 64)
    assert summary["nll_after"] < 0.7 * summary["nll_before"]
    assert logged(folder, "held_out/nll") == [
        summary["nll_before"],
        pytest.approx(summary["nll_after"], abs=1.5),
        summary["nll_after"],
    ]
    check_ledger(folder, summary["nll_before"])
    return logged(folder, "train/nll")


async def test_the_nll_falls_and_reinforcement_goes_on_from_there(tmp_path: Path) -> None:
    """Also from a run that was cut. A run of GRPO begins with the trained weights, its start policy."""
    watcher = QuietReporter()
    folder = (await run_sft(config(tmp_path / "whole"), watcher)).path
    assert {"step 1 to train", "the held-out nll", "the checkpoint of step 3"} <= set(watcher.waits)
    assert watcher.waits[-1] == "the final checkpoint"
    assert (folder / "learning_curve.png").stat().st_size
    ours = check_nll(folder)

    class Cut(QuietReporter):
        def step(self, step: int, metrics: Any) -> None:
            if step == 5:
                raise ZeroDivisionError

    cut = tmp_path / "cut"
    with pytest.raises(ZeroDivisionError):
        await run_sft(config(cut), Cut())
    resumed = QuietReporter()
    await run_sft(config(cut), resumed, path=cut)
    assert len(resumed.steps) == 3, "steps 6 to 8: what ended the run cost no step"
    for name in ("train/nll", "held_out/nll"):
        assert logged(cut, name) == pytest.approx(logged(folder, name), abs=1e-5)

    training = {"steps": 1, "groups_per_step": 3, "group_size": 4, "kl_penalty_coef": 0.05}
    engine = {"checkpoint": str(cut / "checkpoints" / "final")}
    training |= {"batch_rule": "differing_groups"}
    await run_training(short_run(tmp_path / "rl", task=SUMS, engine=engine, training=training), watcher)
    assert watcher.steps[-1]["train/kl_start"] == pytest.approx(0, abs=1e-4)
    assert watcher.steps[-1]["alignment/max_abs_dlogp"] < 1e-4

    with wire_server(TINY_MODEL, tmp_path / "wire", name="tiny-served", full=True) as wire:
        service = {"backend": "tinker", "base_url": wire.url}
        theirs = check_nll((await run_sft(config(tmp_path / "service", service), QuietReporter())).path)
    assert ours == pytest.approx(theirs, abs=1e-4)


# On the episodes of a run


def sampled(run: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Episode of one call -> its tokens, and those that were sampled."""
    return {
        uuid: (unpack_ids(call.new_prompt + call.sampled).tolist(), unpack_ids(call.sampled).tolist())
        for uuid, (call,) in counted_calls(run).items()
    }


def trained(run: Path) -> list[tuple[dict[str, str], list[int], list[int]]]:
    """What each chat of an sft run is from, its tokens, and those that trained."""
    found: list[tuple[dict[str, str], list[int], list[int]]] = []
    for result, packed in ask(
        run, "SELECT result, sequences FROM results AS r JOIN tokens AS t ON t.episode = r.episode"
    ):
        (sequence,) = unpacked_sequences(packed, dictionaries(run))
        tokens = unpack_ids(sequence.chat)
        trains = np.frombuffer(sequence.chat_trained, np.uint8).astype(bool)
        found.append((json.loads(result)["metadata"], tokens.tolist(), tokens[trains].tolist()))
    return found


async def check_dpo(folder: Path, source: Path, engine: dict[str, Any]) -> list[float]:
    data = {"data": str(source), "held_out": 4, "batch_size": 8, "dpo_beta": 0.1, "epochs": 2}
    made = config(folder, engine)
    training = made.training.model_copy(update={"learning_rate": 2e-4})
    changes = {"sft": SftConfig.model_validate(data), "training": training}
    await run_sft(made.model_copy(update=changes), QuietReporter())
    loss, margin = (logged(folder, f"held_out/{name}") for name in ("loss", "margin"))
    assert (loss[0], margin[0]) == (pytest.approx(np.log(2), abs=1e-5), pytest.approx(0, abs=1e-4))
    assert loss[-1] < loss[0]
    assert margin[-1] > 0
    assert logged(folder, "train/loss")[0] == pytest.approx(np.log(2), abs=1e-5)
    assert logged(folder, "train/accuracy")[-1] > 0.5
    summary = json.loads((folder / "summary.json").read_text())
    accuracy = logged(folder, "held_out/accuracy")
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (accuracy[0], accuracy[-1])
    recorded = sampled(source)
    rewards = dict(ask(source, "SELECT uuid, reward FROM episodes"))
    pairs = trained(folder)
    for (better, *one), (worse, *other) in zip(pairs[::2], pairs[1::2], strict=True):
        assert (one, other) == (list(recorded[better["chosen"]]), list(recorded[worse["rejected"]]))
        assert rewards[better["chosen"]] > rewards[worse["rejected"]]
    return loss


async def test_pairs_of_a_run_train_on_their_own_tokens_at_both_engines(tmp_path: Path) -> None:
    training = {"steps": 1, "groups_per_step": 16, "group_size": 4}
    source = tmp_path / "source"
    await run_training(short_run(source, task=SUMS, training=training), QuietReporter())
    ours = await check_dpo(tmp_path / "dpo", source, {})
    with wire_server(TINY_MODEL, tmp_path / "wire", name="tiny-served", full=True) as wire:
        engine = {"backend": "tinker", "base_url": wire.url}
        theirs = await check_dpo(tmp_path / "service", source, engine)
    assert ours == pytest.approx(theirs, abs=1e-4)
