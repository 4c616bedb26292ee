"""A service of Tinker's protocol does what we need: our wire server, or another by `make tinker`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from transformers import AutoTokenizer

from plain_sums import SUMS
from service_target import Target, service_target
from short_runs import curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from tinkerscript.train.sft import run_sft
from wire_setup import KEY, SDK_LEAVES_SOCKETS

pytestmark = [pytest.mark.timeout(1800), SDK_LEAVES_SOCKETS]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.chdir(tmp_path)
    if not os.environ.get("CHECK_SERVICE"):
        monkeypatch.setenv("TINKER_API_KEY", KEY)
    with service_target(tmp_path / "wire") as target:
        yield target


def test_losses_and_log_probabilities_are_the_documented_ones(target: Target) -> None:
    """Each loss from the log probabilities that come with it; the sampler's are the trainer's."""
    service = tinker.ServiceClient(base_url=target.engine()["base_url"] or None)
    client = service.create_lora_training_client(target.model, rank=8).result()
    tokenizer: Any = AutoTokenizer.from_pretrained(target.folder, local_files_only=True)
    prompt: list[int] = tokenizer.encode("What is 17+25?", add_special_tokens=False)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=16, temperature=1.0, seed=1)
    [sampled] = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences
    whole = [*prompt, *sampled.tokens]
    number, length = len(sampled.tokens), len(whole) - 1
    random = np.random.default_rng(1)
    theirs = np.zeros(length, np.float32)
    advantages = np.zeros(length, np.float32)
    # Off by up to half a nat, so that ratios fall on both sides of the clip.
    theirs[-number:] = np.asarray(sampled.logprobs) + random.uniform(-0.5, 0.5, number)
    advantages[-number:] = random.normal(size=number)

    def ask(name: Any, inputs: dict[str, Any], config: dict[str, float] | None) -> tuple[float, np.ndarray]:
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(whole[:-1]),
            loss_fn_inputs={"target_tokens": np.asarray(whole[1:], np.int64), **inputs},
        )
        output = client.forward_backward([datum], name, config).result()
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
        return output.metrics["loss:sum"], logprobs

    weights = (advantages != 0).astype(np.float32)
    loss, ours = ask("cross_entropy", {"weights": weights}, None)
    assert loss == pytest.approx(-(ours * weights).sum(), rel=1e-3)
    assert np.abs(ours[-number:] - np.asarray(sampled.logprobs)).mean() < 0.05
    for name in ("importance_sampling", "ppo", "cispo"):
        clip = (
            None if name == "importance_sampling" else {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
        )
        loss, ours = ask(name, {"logprobs": theirs, "advantages": advantages}, clip)
        terms = documented(name, ours, theirs.astype(np.float64), advantages.astype(np.float64))[-number:]
        assert loss == pytest.approx(terms.sum(), abs=1e-3 * np.abs(terms).sum()), name
    service.close("success").result()


def documented(name: str, ours: np.ndarray, theirs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Each token's loss by Tinker's documentation."""
    ratio = np.exp(ours - theirs)
    clipped = ratio.clip(0.8, 1.2)
    if name == "importance_sampling":
        return -ratio * advantages
    if name == "ppo":
        return -np.minimum(ratio * advantages, clipped * advantages)
    return -clipped * ours * advantages


async def test_chats_then_reinforcement_then_a_resumed_run(target: Target, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for i in range(24):
            reply = {"role": "assistant", "content": f"{i + 100}"[::-1]}
            line = {"messages": [{"role": "user", "content": f"What is {i}+{99 - i}?"}, reply]}
            file.write(json.dumps(line) + "\n")
    sft = RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "sft"),
            "method": "sft",
            "engine": target.engine(),
            "sft": {"data": str(chats), "held_out": 8, "batch_size": 8, "epochs": 3},
            "training": {"learning_rate": 5e-4, "lr_schedule": "constant"},
        }
    )
    folder = await run_sft(sft, QuietReporter())
    figures = json.loads((folder.path / "summary.json").read_text())
    assert figures["nll_after"] < figures["nll_before"]

    def reinforcement(steps: int) -> RunConfig:
        training = {"steps": steps, "groups_per_step": 4, "group_size": 4, "checkpoint_every": 1}
        engine = target.engine(checkpoint=str(folder.path / "checkpoints" / "final"))
        kl: dict[str, Any] = {"kl_penalty_coef": 0.05}
        return short_run(tmp_path / "rl", task=SUMS, engine=engine, training=training | kl)

    await run_training(reinforcement(2), QuietReporter())
    await run_training(reinforcement(3), QuietReporter(), path=tmp_path / "rl")
    lines = curve(tmp_path / "rl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["alignment/mean_abs_dlogp"] < 0.05 for line in lines)
    summary = json.loads((tmp_path / "rl" / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_lost"]) == (3, 0)
