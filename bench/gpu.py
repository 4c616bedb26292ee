"""What a GPU shows, in at most ten minutes and without a network. Results are written after each part.

    python bench/gpu.py [--output FILE] [--device cuda] [--parts loud exact ...] [--shapes 1.7B 8B]

Each part ends with what had to be true and whether it was; the exit status is 1 if anything was not.

- `loud`: the engine loads a model whose logits reach 30, as published models' do, which proves its decoder,
  adapters and shared rows; samples it and trains a step, in bfloat16 with LoRA, also over a base in 8 bits
  and (with bitsandbytes) 4, and in float32; then a run of `tinkerscript train` does the same.
- `exact`: logprobs and gradients on the device against float32 on the CPU.
- `long`: a packed row with a long shared prompt, against the same sequences without sharing.
- `turns`: three conversations of twenty turns, each of which repeats all before it.
- `demo`: `examples/arithmetic.yaml`, with all weights and with LoRA in bfloat16.
- `resume`: the demo, killed after a step and resumed, against the same run without a kill.
- `rows`: 128 rows of 2,048 tokens, against the memory formula.
- `lora`: an adapter over random models, each measurement in a process of its own, against Hugging Face with
  PEFT on the same device: peak memory beside the formula, tokens per second of training and of sampling.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import tinker
import torch
import transformers
from transformers import AutoModelForCausalLM

from live_bytes import LiveBytes, tensors_of, weights_of
from memory import MIB, MODELS
from models import make_loud_model, make_model
from tinkerscript.engine.decoder import logits_rows
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.kv_cache import CacheBudget
from tinkerscript.engine.memory import Workload, peak_memory
from tinkerscript.engine.packing import attend_in_segments
from tinkerscript.engine.quantization import Quantization
from tinkerscript.engine.running_batch import Request, RunningBatch
from tinkerscript.engine.training import AllWeights, Trainer, tokens_of_microbatch
from tinkerscript.engine.weights import LoraSettings, load_model
from tinkerscript.model_folder import TINY_MODEL

ROOT = Path(__file__).parents[1]
PARTS = ("loud", "exact", "long", "turns", "demo", "resume", "rows", "lora")
LORA = LoraSettings(32)
LENGTH = 1024
"""Tokens of a sequence that trains."""

PROMPT, ANSWER = 512, 128


class Sizes(NamedTuple):
    rows: int
    length: int
    """Of each of those rows."""

    prompt: int
    """Tokens that a group shares in part `long`."""

    turns: int
    sequences: int
    """That part `lora` trains on."""

    at_once: int
    """Sequences that it decodes together."""


SIZES = {"cuda": Sizes(128, 2048, 8192, 20, 16, 64), "cpu": Sizes(8, 512, 512, 6, 2, 4)}
"""By kind of device. A CPU only tries the program."""

SHAPES = {"cuda": ("1.7B", "8B"), "cpu": ("20M",)}

CONTEXT = 16_384

LARGEST_LOGIT = 30.0
LARGEST_GAP = {"float32": 1e-4, "bfloat16": 0.1}
"""Most that mean logprobs of sampler and trainer may differ, with logits of that size."""

PARITY = """
import json
from urllib.request import Request, urlopen


def rollout(episode):
    headers = {"Authorization": f"Bearer {episode.openai_api_key}", "Content-Type": "application/json"}
    messages = [{"role": "user", "content": episode.payload["sample"]["input"]}]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urlopen(Request(f"{episode.openai_base_url}/chat/completions", body, headers)) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"] or ""
    return float(sum(map(ord, text)) % 2)
"""
"""Rewards that differ, whatever a model of random weights answers."""

SHORT = ("training.steps=2", "evaluation.episodes=64", "evaluation.every_steps=0")

ADAM = tinker.AdamParams(learning_rate=1e-5)


class Table:
    """Lines of Markdown that are on the screen and in the file as soon as they are known."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._asserted: list[tuple[str, bool]] = []

    def must(self, what: str, is_true: bool) -> None:
        """Note what has to be true, and whether it is, for the end of the part."""
        self._asserted.append((what, is_true))

    def conclude(self) -> int:
        """Say what had to be true, and return how much of it is not."""
        self.say()
        for what, is_true in self._asserted:
            self.say(f"- {'right' if is_true else '**wrong**'}: {what}")
        wrong = sum(not is_true for _, is_true in self._asserted)
        self._asserted.clear()
        return wrong

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def head(self, title: str, *columns: str) -> None:
        self.say(f"\n### {title}\n")
        self.row(*columns)
        self.row(*["---"] * len(columns))

    def row(self, *cells: str) -> None:
        self.say(f"| {' | '.join(cells)} |")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


# Logits of a real model's size


def loud(table: Table, device: torch.device, _: Sequence[str]) -> None:
    table.head(
        f"A model whose logits reach {LARGEST_LOGIT:.0f}, through the whole engine",
        *(
            "weights",
            "shares prefixes",
            "mean |dlogp| of sampler and trainer",
            "nll before",
            "after a step",
        ),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = make_loud_model(Path(name) / "loud", LARGEST_LOGIT)
        bases: list[Quantization] = ["none", "int8"]
        if importlib.util.find_spec("bitsandbytes"):
            bases.append("nf4")
        for label, dtype, adapter, base in (
            *((f"LoRA over {base}" if base != "none" else "LoRA", "bfloat16", LORA, base) for base in bases),
            ("all", "float32", None, "none"),
        ):
            with EmbeddedEngine(
                folder,
                checkpoint_dir=Path(name),
                device=str(device),
                dtype=dtype,
                lora=adapter,
                quantization=base,
            ) as engine:
                gap, before, after = loud_step(engine, learning_rate=1e-3 if adapter else 1e-5)
                shares = "yes" if engine.shares_prefixes else "no"
                table.row(f"{label}, {dtype}", shares, f"{gap:.1e}", f"{before:.3f}", f"{after:.3f}")
            allowed = LARGEST_GAP[dtype]
            table.must(f"{label}, {dtype}: mean gap {gap:.1e} at most {allowed:.0e}", gap <= allowed)
            table.must(f"{label}, {dtype}: a step lowers the loss", after < before)
            if base == "none":
                table.must(f"{label}, {dtype}: the fused decoder, whose steps are graphs", engine.is_fused)
        script = Path(name) / "agent.py"
        script.write_text(PARITY)
        settings = (f"workers.script={script}", "engine.dtype=bfloat16", "engine.lora.rank=16")
        summary, took = trained(device, Path(name) / "run", f"engine.model={folder}", *settings, *SHORT)
        gap, most = summary["mean_abs_dlogp"], LARGEST_GAP["bfloat16"]
        table.must(
            f"a run of two steps ends ({took:.0f} s), mean gap {gap:.1e} at most {most:.0e}", gap <= most
        )
        table.must(f"it trained {summary['tokens_trained']:,} tokens", summary["tokens_trained"] > 0)


def loud_step(engine: EmbeddedEngine, *, learning_rate: float) -> tuple[float, float, float]:
    training = engine.create_training_client()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = rows_of_ids(engine.vocabulary, 1, 64)[0].tolist()
    params = tinker.SamplingParams(max_tokens=32, seed=1, stop=[])
    sampled = sampling.sample(tinker.ModelInput.from_ints(prompt), 8, params).result().sequences
    weights = np.concatenate([np.zeros(len(prompt) - 1), np.full(32, 1 / 256)]).astype(np.float32)
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([*prompt, *each.tokens[:-1]]),
            loss_fn_inputs={"target_tokens": np.array([*prompt[1:], *each.tokens]), "weights": weights},
        )
        for each in sampled
    ]

    def logprobs(output: tinker.ForwardBackwardOutput) -> np.ndarray:
        return np.array([each["logprobs"].to_numpy()[-32:] for each in output.loss_fn_outputs])

    before = logprobs(training.forward_backward(data, "cross_entropy").result())
    training.optim_step(tinker.AdamParams(learning_rate=learning_rate)).result()
    after = logprobs(training.forward(data, "cross_entropy").result())
    gap = np.abs(before - np.array([each.logprobs for each in sampled])).mean()
    return float(gap), float(-before.mean()), float(-after.mean())


# Exactness


def data_of(vocabulary: int, count: int, length: int, prompt: int | None = None) -> list[tinker.Datum]:
    """Sequences that share `prompt` tokens, by default half of their length."""
    random = np.random.default_rng(1)
    shared = random.integers(0, vocabulary, prompt or length // 2)
    data: list[tinker.Datum] = []
    for _ in range(count):
        ids = np.concatenate([shared, random.integers(0, vocabulary, length + 1 - len(shared))])
        weights = (np.arange(length) >= len(shared)).astype(np.float32)
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": ids[1:].astype(np.int64),
                    "weights": weights / weights.sum() / count,
                },
            )
        )
    return data


def gradients(
    folder: Path, device: str, dtype: torch.dtype, data: list[tinker.Datum]
) -> tuple[np.ndarray, torch.Tensor]:
    """Log probabilities of all targets, and the gradient of all weights."""
    trainer = Trainer(AllWeights(load_model(folder, device=device)), share_prefixes=True, compute_dtype=dtype)
    output = trainer.forward_backward(data, "cross_entropy", None, backward=True)
    logprobs = np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs])
    found = [each.grad for each in trainer.model.parameters() if each.grad is not None]
    return logprobs, torch.cat([each.flatten().float().cpu() for each in found])


def exact(table: Table, device: torch.device, _: Sequence[str]) -> None:
    table.head(
        "Against float32 on the CPU",
        *("model", "computed in", "largest gap of log probabilities", "gradient's distance, of its norm"),
    )
    with tempfile.TemporaryDirectory() as name:
        for label, folder in (("tiny", TINY_MODEL), ("20M", make_model(Path(name) / "20m"))):
            vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
            data = data_of(vocabulary, 8, 128)
            reference, direction = gradients(folder, "cpu", torch.float32, data)
            for dtype in (torch.float32, torch.bfloat16):
                logprobs, gradient = gradients(folder, str(device), dtype, data)
                distance = float((gradient - direction).norm() / direction.norm())
                gap = np.abs(logprobs - reference).max()
                name_of = str(dtype)[6:]
                table.row(label, f"{device.type}, {name_of}", f"{gap:.1e}", f"{distance:.1e}")
                allowed = {"float32": 1e-4, "bfloat16": 0.1}[name_of]
                table.must(f"{label}, {name_of}: distance at most {allowed:.0e}", distance <= allowed)


def long(table: Table, device: torch.device, shapes: Sequence[str]) -> None:
    """A group of eight over a long prompt, in one row and in eight."""
    prompt = SIZES[device.type].prompt
    table.head(
        f"Eight answers of 256 tokens over a prompt of {prompt:,}, LoRA, bfloat16, {shapes[0]}",
        *("rows", "seconds a step", "peak, MiB", "loss"),
    )
    found = [in_process(f"long-{share}", shapes[0], "engine", str(device)) for share in (1, 0)]
    for label, each in zip(("one, shared", "eight"), found, strict=True):
        table.row(label, f"{each['seconds']:.2f}", f"{each['peak']:,.0f}", f"{each['loss']:.4f}")
    shared, alone = found
    table.must("both have the same loss to 1e-2", abs(shared["loss"] - alone["loss"]) <= 1e-2)
    table.must("the shared row takes less time", shared["seconds"] < alone["seconds"])


def long_step(shape: str, device: torch.device, *, share: bool) -> dict[str, float]:
    weights = adapters_of(shape, device)
    if share:
        attend_in_segments(weights.model)
    trainer = Trainer(weights, share_prefixes=share)
    prompt = SIZES[device.type].prompt
    data = data_of(MODELS[shape].vocab_size, 8, prompt + 256, prompt)
    losses: list[float] = []

    def step() -> None:
        output = trainer.forward_backward(data, "cross_entropy", None, backward=True)
        losses.append(output.metrics["loss:sum"])
        trainer.optim_step(ADAM)

    step()
    peak = Peak(device, weights).of(step)
    return {"seconds": seconds(device, step), "peak": peak / MIB, "loss": losses[0]}


# Conversations


def turns(table: Table, device: torch.device, shapes: Sequence[str]) -> None:
    last = SIZES[device.type].turns
    table.head(
        f"Three conversations, {last} turns of 48 new tokens and an answer of 32: {shapes[0]}, bfloat16",
        *("turn", "tokens before it", "seconds to the answer"),
    )
    found = in_process("turns", shapes[0], "engine", str(device))
    for turn in (1, last // 2, last):
        table.row(str(turn), str(turn * 80 - 32), f"{found[str(turn)]:.2f}")
    new = 3 * (48 + 1)  # No step has read the last token of an answer.
    table.must(f"the last turn computes at most {new} prompt tokens", found["prefilled"] <= new)
    table.must(
        f"the last turn takes at most twice the second ({found[str(last)] / found['2']:.2f})",
        found[str(last)] <= 2 * found["2"],
    )


def conversations(shape: str, device: torch.device) -> dict[str, float]:
    """Seconds of each turn, by its number from 1, and the prompt tokens that the last one computed."""
    config = MODELS[shape]
    with torch.no_grad():
        decoder = adapters_of(shape, device).decoder()
    batch = RunningBatch(
        decoder,
        max_rows=8,
        max_length=SIZES[device.type].turns * 80,
        decode=str,
        random=np.random.default_rng(0),
    )
    said = [ids.tolist() for ids in rows_of_ids(config.vocab_size, 3, 48)]
    new = np.random.default_rng(1)

    def turn() -> None:
        requests = [Request(tuple(ids), 1, 32, 1.0, 1.0, -1, 1, frozenset(), ()) for ids in said]
        for request in requests:
            batch.submit(request)
        while batch.busy:
            batch.advance()
        for ids, request in zip(said, requests, strict=True):
            ids += request.future.result()[0].ids + new.integers(0, config.vocab_size, 48).tolist()

    found: dict[str, float] = {}
    for each in range(1, SIZES[device.type].turns + 1):
        before = batch.prefilled_tokens
        found[str(each)] = seconds(device, turn)
        found["prefilled"] = batch.prefilled_tokens - before
    return found


# LoRA


def lora(table: Table, device: torch.device, shapes: Sequence[str]) -> None:
    sizes = SIZES[device.type]
    table.head(
        f"LoRA of rank {LORA.rank}, bfloat16, checkpointing: a step of {sizes.sequences} x {LENGTH} tokens",
        *("shape", "way", "tokens/s", "peak, MiB", "formula, MiB"),
    )
    for shape in shapes:
        for way in ("engine", "peft"):
            found = in_process("train", shape, way, str(device))
            formula = f"{found['formula']:,.0f}" if "formula" in found else ""
            table.row(shape, way, f"{found['tokens_per_s']:,.0f}", f"{found['peak']:,.0f}", formula)
    table.head(
        f"The same adapters: prompts of {PROMPT}, answers of {ANSWER} tokens",
        *("shape", "sequences at once", "way", "tokens/s", "peak, MiB"),
    )
    for shape in shapes:
        for rows in (1, sizes.at_once):
            for way in ("engine", "peft"):
                found = in_process(f"sample-{rows}", shape, way, str(device))
                table.row(shape, str(rows), way, f"{found['tokens_per_s']:,.0f}", f"{found['peak']:,.0f}")


def in_process(*arguments: str) -> dict[str, float]:
    """What one measurement printed; a failure, such as too little memory, ends the part with its reason."""
    found = subprocess.run(
        [sys.executable, __file__, "--one", *arguments], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{found.stderr[-2000:]}")
    return json.loads(found.stdout.splitlines()[-1])


def one(what: str, shape: str, way: str, name: str) -> None:
    device = torch.device(name)
    torch.manual_seed(0)
    kind, _, number = what.partition("-")
    if kind == "train":
        found = (train_engine if way == "engine" else train_peft)(shape, device)
    elif kind == "long":
        found = long_step(shape, device, share=number == "1")
    elif kind == "turns":
        found = conversations(shape, device)
    elif kind == "full":
        found = sample_engine(shape, device, int(number), SIZES[device.type].length - ANSWER)
    else:
        found = (sample_engine if way == "engine" else sample_peft)(shape, device, int(number))
    print(json.dumps(found))


class Peak:
    """The peak memory of tensors on a device."""

    def __init__(self, device: torch.device, weights: Any) -> None:
        self._cuda = device.type == "cuda"
        self._live = None if self._cuda else LiveBytes(*tensors_of(weights))

    def of(self, work: Callable[[], object]) -> int:
        if self._live is not None:
            return self._live.peak_of(work)
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def adapters_of(shape: str, device: torch.device) -> Any:
    MODELS[shape].max_position_embeddings = CONTEXT
    return weights_of(MODELS[shape], LORA, torch.bfloat16, checkpointing=True, device=str(device))


def rows_of_ids(vocabulary: int, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (rows, length))


def train_engine(shape: str, device: torch.device) -> dict[str, float]:
    config = MODELS[shape]
    weights = adapters_of(shape, device)
    trainer = Trainer(weights)
    sequences = SIZES[device.type].sequences
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": np.ones(LENGTH, np.float32) / LENGTH},
        )
        for ids in rows_of_ids(config.vocab_size, sequences, LENGTH + 1)
    ]

    def step() -> None:
        trainer.forward_backward(data, "cross_entropy", None, backward=True)
        trainer.optim_step(ADAM)

    step()
    peak = Peak(device, weights).of(step)
    took = min(seconds(device, step) for _ in range(3))
    work = Workload(tokens_of_microbatch(device), logits_rows(config.vocab_size, device), True)
    formula = peak_memory(config, LORA, torch.bfloat16, work).training
    return {
        "tokens_per_s": sequences * LENGTH / took,
        "peak": peak / MIB,
        "formula": formula / MIB,
    }


def peft_model(shape: str, device: torch.device) -> Any:
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(MODELS[shape], dtype=torch.bfloat16)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=names)  # pyright: ignore
    return peft.get_peft_model(model, config)


def train_peft(shape: str, device: torch.device) -> dict[str, float]:
    """As one would write it: rows of one microbatch, Hugging Face's loss and checkpointing, AdamW."""
    model = peft_model(shape, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5)
    sequences = SIZES[device.type].sequences
    ids = torch.from_numpy(rows_of_ids(MODELS[shape].vocab_size, sequences, LENGTH)).to(device)
    at_once = max(1, tokens_of_microbatch(device) // LENGTH)

    def step(rows: int) -> None:
        for part in ids.split(rows):
            model(input_ids=part, labels=part, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    while True:
        try:
            step(at_once)
            break
        except torch.OutOfMemoryError:  # Its logits are whole.
            if at_once == 1:
                raise
            at_once //= 2
            optimizer.zero_grad()
            torch.cuda.empty_cache()
    holder: Any = type("Holder", (), {"model": model})
    peak = Peak(device, holder).of(lambda: step(at_once))
    took = min(seconds(device, lambda: step(at_once)) for _ in range(3))
    return {"tokens_per_s": sequences * LENGTH / took, "peak": peak / MIB, "rows": at_once}


def sample_engine(shape: str, device: torch.device, rows: int, prompt: int = PROMPT) -> dict[str, float]:
    config = MODELS[shape]
    weights = adapters_of(shape, device)
    with torch.no_grad():
        decoder = weights.decoder()
    prompts = rows_of_ids(config.vocab_size, rows, prompt).tolist()
    work = Workload(1, 1, samplers=1, rows=rows, prompt=prompt, length=prompt + ANSWER)
    memory = peak_memory(config, LORA, torch.bfloat16, work)

    def sample() -> None:
        batch = RunningBatch(
            decoder,
            max_rows=rows,
            max_length=prompt + ANSWER,
            decode=str,
            random=np.random.default_rng(0),
            budget=CacheBudget(memory.kv_cache),
        )
        for ids in prompts:
            batch.submit(Request(tuple(ids), 1, ANSWER, 1.0, 1.0, -1, 1, frozenset(), ()))
        while batch.busy:
            batch.advance()

    sample()
    peak = Peak(device, weights).of(sample)
    return {
        "tokens_per_s": rows * ANSWER / seconds(device, sample),
        "peak": peak / MIB,
        "formula": memory.sampling / MIB,
    }


def rows(table: Table, device: torch.device, shapes: Sequence[str]) -> None:
    sizes = SIZES[device.type]
    table.head(
        f"{sizes.rows} rows of {sizes.length:,} tokens, {ANSWER} of them sampled, {shapes[0]}",
        *("tokens/s", "peak, MiB", "formula, MiB"),
    )
    found = in_process(f"full-{sizes.rows}", shapes[0], "engine", str(device))
    table.row(*(f"{found[key]:,.0f}" for key in ("tokens_per_s", "peak", "formula")))
    ratio = found["peak"] / found["formula"]
    table.must(f"the peak is at most the formula and 10% ({ratio:.2f})", ratio <= 1.1)


def sample_peft(shape: str, device: torch.device, rows: int) -> dict[str, float]:
    model = peft_model(shape, device).eval()
    ids = torch.from_numpy(rows_of_ids(MODELS[shape].vocab_size, rows, PROMPT)).to(device)

    def sample() -> None:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=ANSWER,
            max_new_tokens=ANSWER,
            pad_token_id=0,
        )

    sample()
    holder: Any = type("Holder", (), {"model": model})
    peak = Peak(device, holder).of(sample)
    return {"tokens_per_s": rows * ANSWER / seconds(device, sample), "peak": peak / MIB}


# The demo


def command_of(device: torch.device, run: Path, *settings: str) -> list[str]:
    given = (f"engine.device={device}", f"experiment_dir={run}", "page_port=off", *settings)
    config = str(ROOT / "examples" / "arithmetic.yaml")
    return [sys.executable, "-m", "tinkerscript", "train", config, *(f"--set={each}" for each in given)]


def trained(device: torch.device, run: Path, *settings: str) -> tuple[dict[str, Any], float]:
    """The summary of a run of the demo, and the seconds that it took."""
    began = time.perf_counter()
    command = command_of(device, run, *settings)
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        kept = shutil.copytree(run, Path(tempfile.mkdtemp(prefix="failed-")) / "run")
        raise SystemExit(f"the run in {kept} failed:\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}")
    return json.loads((run / "summary.json").read_text()), time.perf_counter() - began


def demo(table: Table, device: torch.device, _: Sequence[str]) -> None:
    table.head(
        f"The demo, `--set engine.device={device}`",
        *("weights", "seconds", "held out before", "after", "mean gap of log probabilities", "largest"),
    )
    lora = ("engine.lora.rank=16", "engine.dtype=bfloat16", "training.learning_rate=1e-3")
    for weights, options, kind, most in (
        ("all, float32", (), "largest", 1e-4),
        ("LoRA, bfloat16", lora, "mean", 0.02),  # Rounding alone makes a few tokens differ by 0.3.
    ):
        with tempfile.TemporaryDirectory() as name:
            summary, took = trained(device, Path(name) / "run", *options)
            scores = (f"{summary[key]:.3f}" for key in ("eval_before", "eval_after"))
            gaps = {"mean": summary["mean_abs_dlogp"], "largest": summary["max_abs_dlogp"]}
            table.row(weights, f"{took:.0f}", *scores, *(f"{gap:.1e}" for gap in gaps.values()))
        table.must(f"{weights}: {kind} gap at most {most:.0e}", gaps[kind] <= most)
        table.must(f"{weights}: at least 0.9 held out", summary["eval_after"] >= 0.9)


def resume(table: Table, device: torch.device, _: Sequence[str]) -> None:
    """A run whose trainer is killed after its second step, and goes on from its checkpoint."""
    settings = ("training.steps=4", "training.checkpoint_every=1", "evaluation.episodes=0")
    with tempfile.TemporaryDirectory() as name:
        whole, cut = Path(name) / "whole", Path(name) / "cut"
        trained(device, whole, *settings)
        killed = subprocess.Popen(
            command_of(device, cut, *settings),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while len(rewards_of(cut)) < 2 and killed.poll() is None:
            time.sleep(0.1)
        killed.kill()
        killed.wait()
        again = [sys.executable, "-m", "tinkerscript", "train", "--resume", str(cut)]
        subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
        first, second = rewards_of(whole), rewards_of(cut)
    table.head(
        "Mean rewards of four steps, one of them resumed", *("run", *(f"step {i}" for i in range(1, 5)))
    )
    for label, found in (("whole", first), ("killed and resumed", second)):
        table.row(label, *(f"{each:.4f}" for each in found))
    table.must("a resumed run goes on with the curve of one that was not killed", first == second)


def rewards_of(run: Path) -> list[float]:
    """The mean reward of each step that `run` has made."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {each["step"]: each["reward/mean"] for each in lines if "reward/mean" in each}
    return [found[step] for step in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="Markdown, appended to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", choices=MODELS, help="1.7B and 8B, on a CPU 20M")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(*given.one)
        return
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no CUDA device here; --device cpu tries all")
    shapes = given.shapes or SHAPES[device.type]
    table = Table(given.output)
    table.say(
        f"{device_name(device)}, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, PEFT {peft.__version__}"
    )
    wrong = 0
    for part in given.parts:
        began = time.monotonic()
        globals()[part](table, device, shapes)
        wrong += table.conclude()
        table.say(f"\n({part}: {time.monotonic() - began:.0f} s)")
    if wrong:
        raise SystemExit(f"{wrong} of what had to be true is not")


if __name__ == "__main__":
    main()
