"""Peak memory of training and sampling against the formula of `tinkerscript.engine.memory`.

    python bench/memory.py [--parts training sampling loss real runs eight]

`training`, `loss` and `eight` use tensors without data; `real` and `runs` compute in processes of their own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from live_bytes import LiveBytes, TrainingSteps, make_fake, qwen3, sampling_peak, tensors_of, weights_of
from models import make_model
from tinkerscript.engine.decoder import logits_rows
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.memory import Workload, peak_memory
from tinkerscript.engine.weights import LoraSettings

MODELS = {
    "20M": qwen3(8192, 384, 1152, 10, 6, 2, 64),
    "150M": qwen3(32_000, 768, 2304, 12, 12, 4, 64),
    "0.6B": qwen3(151_936, 1024, 3072, 28, 16, 8, 128),
    "1.7B": qwen3(151_936, 2048, 6144, 28, 16, 8, 128),
    "8B": qwen3(151_936, 4096, 12_288, 36, 32, 8, 128, tie_word_embeddings=False),
}
LORA = LoraSettings(16)
MIB = 2**20
PARTS = ("training", "sampling", "loss", "real", "runs", "eight")
CPU = torch.device("cpu")


def tables(config: Any, dtype: torch.dtype) -> int:
    """Rotary tables of samplers, which the formula counts and a process that only trains in fakes lacks."""
    return 2 * dtype.itemsize * config.max_position_embeddings * config.head_dim


def row(what: str, measured: int, formula: int) -> None:
    print(f"| {what} | {measured / MIB:,.0f} | {formula / MIB:,.0f} | {formula / measured:.3f} |", flush=True)


def training() -> None:
    print("\n| training, 4,096 tokens | measured, MiB | formula, MiB | ratio |\n|---|---|---|---|")
    kinds = [(LORA, torch.float32), (LORA, torch.bfloat16), (None, torch.float32), (None, torch.bfloat16)]
    for name in ("20M", "150M", "0.6B"):
        for lora, dtype in kinds:
            for checkpointing in (False, True):
                config = MODELS[name]
                weights = weights_of(config, lora, dtype, checkpointing=checkpointing, device="meta")
                with FakeTensorMode(allow_non_fake_inputs=True):
                    make_fake(weights)
                    steps = TrainingSteps(
                        weights, tokens=4096, length=1024, autocast=lora is None and dtype == torch.bfloat16
                    )
                    measured = steps.peak(LiveBytes(*tensors_of(weights)))
                work = Workload(4096, logits_rows(config.vocab_size, CPU), checkpointing)
                formula = peak_memory(config, lora, dtype, work).training - tables(config, dtype)
                kind = f"{'LoRA' if lora else 'all weights'}, {str(dtype)[6:]}"
                row(f"{name}, {kind}{', checkpointing' if checkpointing else ''}", measured, formula)


def sampling() -> None:
    print("\n| 32 rows of 512 to 530 tokens | measured, MiB | formula, MiB | ratio |\n|---|---|---|---|")
    small = [("20M", LORA, torch.float32), ("20M", LORA, torch.bfloat16), ("20M", None, torch.float32)]
    for name, lora, dtype in [*small, ("150M", LORA, torch.bfloat16)]:
        config = MODELS[name]
        weights = weights_of(config, lora, dtype, checkpointing=False, device="cpu")
        work = Workload(1, 1, samplers=1, rows=32, prompt=512, length=530)
        memory = peak_memory(config, lora, dtype, work)
        measured = sampling_peak(weights, dtype, rows=32, prompt=512, length=530, budget=memory.kv_cache)
        kind = f"{'LoRA' if lora else 'all weights'}, {str(dtype)[6:]}"
        row(f"{name}, {kind}", measured, memory.sampling)


def loss() -> None:
    print("\n| a loss over 151,936 ids, beyond the model | Hugging Face + PEFT, MiB | engine, MiB | share |")
    print("|---|---|---|---|")
    config = qwen3(151_936, 1024, 3072, 2, 16, 8, 128)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (2048, 4096, 16_384):
            peaks: list[int] = []
            for work in ("with_labels", "microbatch"):
                weights = weights_of(config, LORA, dtype, checkpointing=False, device="meta")
                with FakeTensorMode(allow_non_fake_inputs=True):
                    make_fake(weights)
                    live = LiveBytes(*tensors_of(weights))
                    held = live.now
                    steps = TrainingSteps(weights, tokens=tokens, length=1024)
                    peaks.append(live.peak_of(getattr(steps, work)) - held)
            theirs, ours = (peak / MIB for peak in peaks)
            kind = f"{str(dtype)[6:]}, {tokens:,} tokens"
            print(f"| {kind} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.2f} |", flush=True)


def eight() -> None:
    print("\n| 8B, rank 32, bfloat16, checkpointing, 4,096 tokens | MemTracker, MiB | formula | ratio |")
    print("|---|---|---|---|")
    config, lora = MODELS["8B"], LoraSettings(32)
    weights = weights_of(config, lora, torch.bfloat16, checkpointing=True, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        make_fake(weights)
        steps = TrainingSteps(weights, tokens=4096, length=4096)
        tracker = Tracker()
        tracker.track_external(weights.model)
        with tracker:
            for _ in range(2):  # The second time with moments and gradients.
                tracker.reset_mod_stats()
                steps.microbatch()
                steps.step()
        measured = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    work = Workload(4096, logits_rows(config.vocab_size, CPU), activation_checkpointing=True)
    memory = peak_memory(config, lora, torch.bfloat16, work)
    row("tensors without data", measured, memory.training - tables(config, torch.bfloat16))


class Tracker(MemTracker):
    """Torch's tracker of all tensors, without what it keeps of each module, which takes an hour for 8B, and
    without its hooks on gradients, which frozen weights cannot have."""

    def _track_module_params_and_buffers(
        self, module: Any, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device], self._peak_mem_snap[device] = now["Total"], dict(now)


def real() -> None:
    print("\n| computed, in a process of its own, 1,024 tokens | live tensors | formula | ratio | resident |")
    print("|---|---|---|---|---|")
    for name, dtype in (("20M", "float32"), ("150M", "float32"), ("0.6B", "bfloat16")):
        subprocess.run([sys.executable, __file__, "--one", name, dtype], check=True)


def one(name: str, kind: str) -> None:
    """Compute: peaks of live tensors, and of the resident memory beyond what was there before the model."""
    config, dtype = MODELS[name], getattr(torch, kind)
    before = resident()
    weights = weights_of(config, LORA, dtype, checkpointing=True, device="cpu")
    measured = TrainingSteps(weights, tokens=1024, length=512).peak(LiveBytes(*tensors_of(weights)))
    work = Workload(1024, logits_rows(config.vocab_size, CPU), activation_checkpointing=True)
    formula = peak_memory(config, LORA, dtype, work).training - tables(config, dtype)
    print(
        f"| {name}, LoRA, {kind}, checkpointing | {measured / MIB:,.0f} | {formula / MIB:,.0f} | "
        f"{formula / measured:.3f} | {resident() - before:,.0f} |",
        flush=True,
    )


def runs() -> None:
    """What an engine's process takes for 1 and for 8 runs of an adapter over one base."""
    print("\n| runs over one base of 150M, float32, LoRA of rank 16 | resident |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), MODELS["150M"])
        for number in ("1", "2", "8"):
            subprocess.run([sys.executable, __file__, "--one", folder, number], check=True)


def several(folder: str, number: int) -> None:
    """Resident memory, beyond what was there before, after each of `number` runs has made two steps."""
    before = resident()
    ids = np.random.default_rng(0).integers(0, 1000, 257)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={"target_tokens": ids[1:].astype(np.int64), "weights": np.ones(256, np.float32)},
    )
    with EmbeddedEngine(Path(folder), lora=LORA) as engine:
        clients = [engine.train_copy(lora=LORA).result() for _ in range(number)]
        for client in clients * 2:
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(tinker.AdamParams()).result()
        print(f"| {number} | {resident() - before:,.0f} |", flush=True)


def resident() -> float:
    """Peak MiB of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        if given.one[1].isdecimal():
            several(given.one[0], int(given.one[1]))
        else:
            one(*given.one)
        return
    for part in given.parts:
        began = time.monotonic()
        globals()[part]()
        print(f"\n({part}: {time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
