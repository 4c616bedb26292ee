"""Supervised training on chats, at both engines, and a reinforcement run that starts from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_ledger import ask, counted_calls, dictionaries
from short_runs import curve, short_run
from tinkerscript.config import RunConfig, SftConfig
from tinkerscript.errors import EngineError
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


def config(tmp_path: Path, folder: str, engine: dict[str, Any] | None = None, **sft: Any) -> RunConfig:
    """Chats about something that the tiny model does not know: sums of two digits, said backwards."""
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for i in range(10, 90):
            messages = [
                {"role": "user", "content": f"What is {i}+{99 - i}?"},
                {"role": "assistant", "content": f"{i + 7}"[::-1]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / folder),
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


def reinforcement(tmp_path: Path, engine: dict[str, Any]) -> RunConfig:
    training = {"steps": 2, "groups_per_step": 6, "group_size": 4, "kl_penalty_coef": 0.05}
    return short_run(tmp_path / "rl", engine=engine, training=training | {"batch_rule": "differing_groups"})


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


async def check_both(tmp_path: Path, engine: dict[str, Any]) -> list[float]:
    """The nll falls; a run of GRPO begins with the trained weights, and knows them as its start policy."""
    watcher = QuietReporter()
    folder = await run_sft(config(tmp_path, "sft", engine), watcher)
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["steps"], summary["chats_trained"]) == (8, 64)
    assert summary["nll_after"] < 0.7 * summary["nll_before"]
    assert logged(folder.path, "held_out/nll") == [
        summary["nll_before"],
        pytest.approx(summary["nll_after"], abs=1.5),
        summary["nll_after"],
    ]
    assert len(watcher.steps) == 8
    assert {"step 1 to train", "the held-out nll", "the checkpoint of step 3"} <= set(watcher.waits)
    assert watcher.waits[-1] == "the final checkpoint"
    assert (folder.path / "learning_curve.png").stat().st_size
    check_ledger(folder.path, summary["nll_before"])
    final = str(folder.path / "checkpoints" / "final")
    steps = QuietReporter()
    await run_training(reinforcement(tmp_path, engine | {"checkpoint": final}), steps)
    assert steps.steps[0]["train/kl_start"] == pytest.approx(0, abs=1e-4)
    assert max(step["alignment/max_abs_dlogp"] for step in steps.steps) < 1e-4
    return logged(folder.path, "train/nll")


async def test_the_nll_falls_and_reinforcement_goes_on_from_there(tmp_path: Path) -> None:
    ours = await check_both(tmp_path, {})
    (tmp_path / "service").mkdir()
    with wire_server(TINY_MODEL, tmp_path / "wire", name="tiny-served", full=True) as wire:
        theirs = await check_both(tmp_path / "service", {"backend": "tinker", "base_url": wire.url})
    assert ours == pytest.approx(theirs, abs=1e-4)


async def test_a_run_that_is_cut_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole = await run_sft(config(tmp_path, "whole"), QuietReporter())

    class Cut(QuietReporter):
        def step(self, step: int, metrics: Any) -> None:
            if step == 5:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_sft(config(tmp_path, "cut"), Cut())
    cut = tmp_path / "cut"
    watcher = QuietReporter()
    await run_sft(config(tmp_path, "cut"), watcher, path=cut)
    assert len(watcher.steps) == 3, "steps 6 to 8: what ended the run cost no step"
    for name in ("train/nll", "held_out/nll"):
        assert logged(cut, name) == pytest.approx(logged(whole.path, name), abs=1e-5)


async def test_a_checkpoint_that_cannot_be_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot load a causal language model from .*nowhere"):
        await run_training(
            reinforcement(tmp_path, {"checkpoint": str(tmp_path / "nowhere")}), QuietReporter()
        )


# On the episodes of a run


def from_run(tmp_path: Path, folder: str, source: Path, engine: dict[str, Any], **sft: Any) -> RunConfig:
    given = {"data": str(source), "held_out": 4, "batch_size": 8, **sft}
    made = config(tmp_path, folder, engine)
    training = made.training.model_copy(update={"learning_rate": 2e-4})
    return made.model_copy(update={"sft": SftConfig.model_validate(given), "training": training})


async def source_run(tmp_path: Path) -> Path:
    training = {"steps": 2, "groups_per_step": 16, "group_size": 6, "learning_rate": 1e-5}
    folder = await run_training(short_run(tmp_path / "source", training=training), QuietReporter())
    return folder.path


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


async def test_the_best_episodes_of_a_run_train_on_their_own_tokens(tmp_path: Path) -> None:
    source = await source_run(tmp_path)
    folder = await run_sft(from_run(tmp_path, "best", source, {}, best=2), QuietReporter())
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["nll_after"] < summary["nll_before"]
    rewards = dict(ask(source, "SELECT uuid, reward FROM episodes"))
    recorded, found = sampled(source), trained(folder.path)
    assert len(found) == summary["chats_trained"] > 20
    for origin, tokens, own in found:
        assert (tokens, own) == recorded[origin["chosen"]]
        assert rewards[origin["chosen"]] > min(rewards.values())


async def check_dpo(tmp_path: Path, source: Path, engine: dict[str, Any]) -> list[float]:
    settings = from_run(tmp_path, "dpo", source, engine, dpo_beta=0.1, epochs=3)
    folder = await run_sft(settings, QuietReporter())
    loss, margin = (logged(folder.path, f"held_out/{name}") for name in ("loss", "margin"))
    assert (loss[0], margin[0]) == (pytest.approx(np.log(2), abs=1e-5), pytest.approx(0, abs=1e-4))
    assert loss[-1] < loss[0]
    assert margin[-1] > 0
    assert logged(folder.path, "train/loss")[0] == pytest.approx(np.log(2), abs=1e-5)
    assert logged(folder.path, "train/accuracy")[-1] > 0.5
    summary = json.loads((folder.path / "summary.json").read_text())
    accuracy = logged(folder.path, "held_out/accuracy")
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (accuracy[0], accuracy[-1])
    recorded = sampled(source)
    rewards = dict(ask(source, "SELECT uuid, reward FROM episodes"))
    pairs = trained(folder.path)
    for (better, *one), (worse, *other) in zip(pairs[::2], pairs[1::2], strict=True):
        assert (one, other) == (list(recorded[better["chosen"]]), list(recorded[worse["rejected"]]))
        assert rewards[better["chosen"]] > rewards[worse["rejected"]]
    return loss


async def test_pairs_of_a_run_train_the_same_at_both_engines(tmp_path: Path) -> None:
    source = await source_run(tmp_path)
    ours = await check_dpo(tmp_path, source, {})
    (tmp_path / "service").mkdir()
    with wire_server(TINY_MODEL, tmp_path / "wire", name="tiny-served", full=True) as wire:
        engine = {"backend": "tinker", "base_url": wire.url}
        theirs = await check_dpo(tmp_path / "service", source, engine)
    assert ours == pytest.approx(theirs, abs=1e-4)
