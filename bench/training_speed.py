"""Training workloads of `bench/engine.py`: our trainer, and a plain Hugging Face step, over the same data.

    python bench/training_speed.py FOLDER (shared | plain | hugging_face)

By itself it prints the process's peak memory in MiB before and after one step on groups.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from torch import Tensor

from tinkerscript.engine.packing import pair_cost, token_trees
from tinkerscript.engine.training import MICROBATCH_TOKENS, AllWeights, Trainer
from tinkerscript.engine.weights import load_model

GROUP = 16
ADAM = tinker.AdamParams(learning_rate=1e-5, grad_clip_norm=1.0)


def datum(ids: np.ndarray, sampled: int, rng: np.random.Generator) -> tinker.Datum:
    """The last `sampled` ids train, with one advantage."""
    length = len(ids) - 1
    advantages = np.zeros(length, np.float32)
    advantages[-sampled:] = rng.normal()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": ids[1:].astype(np.int64),
            "logprobs": np.full(length, -6.0, np.float32),
            "advantages": advantages,
        },
    )


def grouped(groups: int, vocabulary: int, *, prompt: int, answers: tuple[int, int]) -> list[tinker.Datum]:
    """Groups of 16 with a prompt of `prompt` ids and answers of a length in `answers`."""
    rng = np.random.default_rng(0)
    data: list[tinker.Datum] = []
    for _ in range(groups):
        shared = rng.integers(0, vocabulary, prompt)
        for _ in range(GROUP):
            length = int(rng.integers(answers[0], answers[1] + 1))
            data.append(datum(np.concatenate([shared, rng.integers(0, vocabulary, length)]), length, rng))
    return data


def ragged(count: int, vocabulary: int) -> list[tinker.Datum]:
    """Sequences of 8 to 512 ids, most of them short, with nothing in common."""
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.uniform(np.log(8), np.log(512), count)).astype(int)
    return [datum(rng.integers(0, vocabulary, n + 1), max(1, n // 2), rng) for n in lengths]


def tokens_of(data: list[tinker.Datum]) -> int:
    return sum(d.model_input.length for d in data)


def computed_tokens(model: Any, data: list[tinker.Datum]) -> int:
    """Tokens that are left to compute when prefixes are shared."""
    ids = [np.asarray(d.model_input.to_ints(), np.int64) for d in data]
    trees = token_trees(ids, pair_cost=pair_cost(model), budget=MICROBATCH_TOKENS)
    return sum(tree.size for tree in trees)


class OurStep:
    """One forward and backward pass and one optimizer step of the engine's trainer."""

    def __init__(self, model: Any, *, share: bool) -> None:
        self._trainer = Trainer(AllWeights(model), share_prefixes=share)

    def __call__(self, data: list[tinker.Datum]) -> None:
        self._trainer.forward_backward(data, "importance_sampling", None, backward=True)
        self._trainer.optim_step(ADAM)


class HuggingFaceStep:
    """The same as one would write it: padded batches of 16 in the order of the data, torch's AdamW."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)

    def __call__(self, data: list[tinker.Datum]) -> None:
        for first in range(0, len(data), GROUP):
            self._backward(data[first : first + GROUP])
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self, batch: list[tinker.Datum]) -> None:
        width = max(d.model_input.length for d in batch)
        ids, mask = torch.zeros(len(batch), width, dtype=torch.long), torch.zeros(len(batch), width)
        for row, d in enumerate(batch):
            ids[row, : d.model_input.length] = torch.tensor(d.model_input.to_ints())
            mask[row, : d.model_input.length] = 1
        inputs = {name: self._padded(batch, name, width) for name in batch[0].loss_fn_inputs}
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits.log_softmax(-1).gather(-1, inputs["target_tokens"][..., None])[..., 0]
        ratio = (logprobs - inputs["logprobs"]).exp()
        (-(ratio * inputs["advantages"] * mask).sum()).backward()

    @staticmethod
    def _padded(batch: list[tinker.Datum], name: str, width: int) -> Tensor:
        rows = [torch.from_numpy(d.loss_fn_inputs[name].to_numpy()) for d in batch]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def step_of(kind: str, model: Any) -> OurStep | HuggingFaceStep:
    return HuggingFaceStep(model) if kind == "hugging_face" else OurStep(model, share=kind == "shared")


def peak_mib() -> float:
    """Of this program; `getrusage` would count what its parent had before it was started."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    torch.set_num_threads(1)
    model: Any = load_model(Path(sys.argv[1]))
    data = grouped(1, int(model.config.vocab_size), prompt=256, answers=(8, 24))
    step, before = step_of(sys.argv[2], model), peak_mib()
    step(data)
    print(round(before), round(peak_mib()))


if __name__ == "__main__":
    main()
