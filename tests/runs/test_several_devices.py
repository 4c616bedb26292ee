"""Training on several gloo ranks equals training in one process, resumes on another number, and ends as one.

Each engine starts processes that import torch, so a test does much with the ones that it has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
import torch
from safetensors.torch import load_file

from small_models import small_model
from tinkerscript.engine import decoder, packing, ranks
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.losses import CHOSEN_EXPERTS
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import EngineError
from tinkerscript.rollouts.trainers import packed_experts

LORA = LoraSettings(4, alpha=8.0, seed=5)
ADAM = tinker.AdamParams(
    learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
)
STEPS = 10
IDLE_S = 10.0
"""The group's time-out in these tests."""


@pytest.fixture(scope="module")
def batches() -> list[list[tinker.Datum]]:
    """A batch a step: groups of four that share a prompt, and forks; advantages of either sign."""
    random = np.random.default_rng(7)
    batches: list[list[tinker.Datum]] = []
    for _ in range(STEPS):
        sequences: list[tuple[int, np.ndarray]] = []
        for _ in range(3):
            prompt = random.integers(2, 64, 12)
            replies = [random.integers(2, 64, random.integers(2, 10)) for _ in range(4)]
            sequences += [(12, np.concatenate([prompt, reply])) for reply in replies]
            longer = np.concatenate([prompt, replies[0], random.integers(2, 64, 8)])
            sequences.append((12 + len(replies[0]), longer))
        batches.append([datum(ids, prompt, float(random.normal()) / 15) for prompt, ids in sequences])
    return batches


def datum(ids: np.ndarray, prompt: int, advantage: float) -> tinker.Datum:
    trained = (np.arange(1, len(ids)) >= prompt).astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(ids[1:].astype(np.int64)),
            "weights": tinker.TensorData.from_numpy(trained * np.float32(advantage)),
        },
    )


class Recording:
    """What a client's steps gave."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.logprobs: list[np.ndarray] = []

    def train(self, client: EmbeddedTrainingClient, batches: Sequence[list[tinker.Datum]]) -> Recording:
        for batch in batches:
            output = client.forward_backward(batch, "cross_entropy").result()
            self.losses.append(output.metrics["loss:sum"])
            self.logprobs.append(
                np.concatenate([row["logprobs"].to_numpy() for row in output.loss_fn_outputs])
            )
            self.norms.append((client.optim_step(ADAM).result().metrics or {})["grad_norm"])
        return self

    def assert_equal(self, other: Recording, steps: slice) -> None:
        assert self.losses == pytest.approx(other.losses[steps], abs=1e-5)
        assert self.norms == pytest.approx(other.norms[steps], rel=1e-5, abs=1e-5)
        for one, two in zip(self.logprobs, other.logprobs[steps], strict=True):
            np.testing.assert_allclose(one, two, atol=5e-5)


def assert_same_files(one: Path, other: Path) -> None:
    """Of two checkpoints: the names of files and tensors, and the values to 1e-5."""
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    (weights,) = one.glob("*.safetensors")
    mine, theirs = load_file(weights), load_file(other / weights.name)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0, msg=name)
    states: list[Any] = [torch.load(each / "optimizer.pt", weights_only=True) for each in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for at, entry in states[0]["state"].items():
        for name, value in entry.items():
            assert type(value) is torch.Tensor
            torch.testing.assert_close(value, states[1]["state"][at][name], atol=1e-5, rtol=1e-4)


def sampled_logprobs(client: Any, batch: list[tinker.Datum]) -> np.ndarray:
    rows: list[float] = []
    for each in batch:
        whole = [*each.model_input.to_ints(), int(each.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
        rows += client.compute_logprobs(tinker.ModelInput.from_ints(whole)).result()[1:]
    return np.array(rows, np.float32)


def child_of(engine: EmbeddedEngine, rank: int) -> psutil.Process:
    """The process of a rank."""
    for child in psutil.Process().children():
        if "rank" in child.cmdline() and child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("two", "three", "lora"),
    [
        ("replicate", "shard", LORA),
        pytest.param("shard", "replicate", LORA, marks=pytest.mark.long),
        pytest.param("shard", "replicate", None, marks=pytest.mark.long),
    ],
    ids=["replicate-shard-lora", "shard-replicate-lora", "shard-replicate-full"],
)
def test_ranks_train_as_one_process_does_and_resume_on_another_number(
    two: Any,
    three: Any,
    lora: LoraSettings | None,
    random_model: Path,
    batches: list[list[tinker.Datum]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "GROUP_TIMEOUT_S", IDLE_S)
    # In rank 0: long rows have no mask, and logits are held in chunks.
    monkeypatch.setattr(packing, "MASKED_TOKENS", 0)
    monkeypatch.setattr(decoder, "LOGITS_ENTRIES", 64 * 16)

    def opened(devices: int, sharding: Any = "replicate") -> EmbeddedEngine:
        (tmp_path / "logs").mkdir(exist_ok=True)
        return EmbeddedEngine(
            random_model,
            checkpoint_dir=tmp_path,
            lora=lora,
            devices=devices,
            sharding=sharding,
            activation_checkpointing=devices > 1,
            log_dir=tmp_path / "logs",
        )

    with opened(1) as engine:
        assert engine.shares_prefixes
        client = engine.create_training_client()
        client.save_state("begun").result()
        straight = Recording().train(client, batches)
        client.save_state("straight").result()

    with opened(2, two) as engine:
        client = engine.create_training_client()
        on_two = Recording().train(client, batches[:4])
        client.save_state("after-4").result()
        left_at = time.monotonic()

        with opened(1) as alone:
            again = alone.create_training_client()
            again.load_state_with_optimizer(tmp_path / "after-4").result()
            Recording().train(again, batches[4:7]).assert_equal(straight, slice(4, 7))
            again.save_state("after-7").result()

        while time.monotonic() < left_at + IDLE_S + 1:  # The followers idle for longer than the time-out.
            time.sleep(0.1)
        on_two.train(client, batches[4:]).assert_equal(straight, slice(0, STEPS))
        client.save_state("on-two").result()
        assert_same_files(tmp_path / "on-two", tmp_path / "straight")

    with opened(3, three) as engine:
        client = engine.create_training_client()
        client.load_state(tmp_path / "begun").result()
        Recording().train(client, batches).assert_equal(straight, slice(0, STEPS))
        client.load_state_with_optimizer(tmp_path / "after-7").result()
        Recording().train(client, batches[7:]).assert_equal(straight, slice(7, STEPS))
        client.save_state("after-10").result()
        assert_same_files(tmp_path / "after-10", tmp_path / "straight")

        # The decoder has the trainer's weights, also after passes without gradients around a step.
        client.forward_backward(batches[0], "cross_entropy").result()
        client.forward(batches[1], "cross_entropy").result()
        client.optim_step(ADAM).result()
        rows = client.forward(batches[1], "cross_entropy").result().loss_fn_outputs
        sampler = client.save_weights_and_get_sampling_client().result()
        np.testing.assert_allclose(
            sampled_logprobs(sampler, batches[1]),
            np.concatenate([row["logprobs"].to_numpy() for row in rows]),
            atol=1e-4,
        )
        dies_while_a_pass_waits_for_it(client, batches[0], engine, child_of(engine, 2), child_of(engine, 1))


def dies_while_a_pass_waits_for_it(
    client: EmbeddedTrainingClient,
    batch: list[tinker.Datum],
    engine: EmbeddedEngine,
    victim: psutil.Process,
    other: psutil.Process,
) -> None:
    """The pass fails within 10 seconds and names the rank, the others end, and later calls say the same."""
    victim.suspend()
    running = client.forward_backward(batch, "cross_entropy")
    stepping = client.optim_step(ADAM)
    victim.kill()
    killed_at = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 2 of 3 ended \(signal 9\); the end of .*rank-2.log"):
        running.result()
    with pytest.raises(EngineError):
        stepping.result()
    other.wait(timeout=10)
    assert time.monotonic() < killed_at + 10
    assert engine.ranks is not None
    assert isinstance(engine.ranks.failure.exception(timeout=0), EngineError)
    with pytest.raises(EngineError, match="rank 2 of 3 ended"):
        client.forward_backward(batch, "cross_entropy").result()


def chats(folder: Path) -> Path:
    """A config of supervised training that takes minutes, with a checkpoint after each of its short steps."""
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(10, 42):
            messages = [
                {"role": "user", "content": f"What is {i}+{99 - i}?"},
                {"role": "assistant", "content": f"{i + 7}"[::-1]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    config = {
        "experiment_dir": str(folder / "run"),
        "method": "sft",
        "engine": {"devices": 2, "lora": {"rank": 4}},
        "sft": {"data": str(folder / "chats.jsonl"), "held_out": 8, "batch_size": 8, "epochs": 10_000},
        "training": {"checkpoint_every": 1, "lr_schedule": "constant"},
    }
    (folder / "sft.yaml").write_text(json.dumps(config))
    return folder / "sft.yaml"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_whose_rank_dies_says_so_and_resumes_under_torchrun(tmp_path: Path) -> None:
    config, run = chats(tmp_path), tmp_path / "run"
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkerscript", "train", str(config)], stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step_*")):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        (follower,) = psutil.Process(process.pid).children()
        follower.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        assert process.wait(timeout=30) == 2
        print(f"ended {time.monotonic() - killed_at:.1f} s after its rank")
    finally:
        process.kill()
        process.wait()
    text = output.read_text()
    assert "rank 1 of 2 ended (signal 9)" in text
    assert f"once the cause is fixed, resume with: tinkerscript train --resume {run}" in text

    lines = (run / "metrics.jsonl").read_text().splitlines()
    epochs = json.loads(lines[-1])["step"] // 3 + 2
    resumed = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "tinkerscript", "train", "--resume", str(run), "--set", f"sft.epochs={epochs}"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr.decode()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3 * epochs
    assert (run / "checkpoints" / "final" / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_every_rank_replays_the_experts_of_its_part(random_model: Path, tmp_path: Path) -> None:
    folder, random = tmp_path / "mixture", np.random.default_rng(3)
    settings = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = small_model("Qwen3Moe", **settings, num_key_value_heads=2, initializer_range=0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(random_model / name, folder)
    own = [datum(random.integers(2, 64, 24), 4, 1.0) for _ in range(6)]
    data: list[tinker.Datum] = []
    for each in own:
        rows = random.integers(0, 8, (23, 4)).astype(np.uint8)  # 2 of 8 experts in 2 layers.
        chosen = {CHOSEN_EXPERTS: tinker.TensorData.from_numpy(packed_experts(rows))}
        inputs = {**each.loss_fn_inputs, **chosen}
        data.append(tinker.Datum(model_input=each.model_input, loss_fn_inputs=inputs))
    found: list[list[np.ndarray]] = []
    for devices in (1, 2):
        with EmbeddedEngine(
            folder,
            checkpoint_dir=tmp_path,
            devices=devices,
            sharding="shard",
            routing_replay=True,
            log_dir=tmp_path,
        ) as engine:
            client = engine.create_training_client()
            client.forward_backward(data, "cross_entropy").result()
            client.optim_step(ADAM).result()
            for part in (data, own):
                output = client.forward(part, "cross_entropy").result()
                found.append([row["logprobs"].to_numpy() for row in output.loss_fn_outputs])
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)
    assert np.abs(np.subtract(found[2], found[3])).mean() > 0.01
