"""Build the tiny model that ships in `src/tinkerscript/engine/tiny/`: tokenizer, weights, `training.json`.

    python scripts/build_tiny_model.py --out src/tinkerscript/engine/tiny

No network and no accelerator. The same --steps and --seed on the same versions and machine give the same
weights; with --minutes the number of steps depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
import transformers

from tiny_model import training
from tiny_model.data import POOL, Mix, Sampler
from tiny_model.problems import split_pairs
from tiny_model.tokenizer import save_tokenizer, train_tokenizer

STEPS = 8000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if it is missing")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"optimizer steps (default {STEPS})")
    length.add_argument("--minutes", type=float, help="train for this long instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=Mix.noise, help="share of sums with one wrong digit")
    parser.add_argument("--samples", type=int, default=10, help="samples measured on each problem")
    args = parser.parse_args()
    if args.steps is None and args.minutes is None:
        args.steps = STEPS
    return args


def build(out: Path, budget: training.Budget, mix: Mix, seed: int, samples_each: int) -> dict[str, object]:
    """Write the model folder `out`; the record that training.json holds."""
    tokenizer = save_tokenizer(train_tokenizer(), out)
    model = training.make_model(tokenizer, seed)
    # A short run draws few sequences, so it need not render all that it could draw from.
    pool = POOL if budget.steps is None else min(POOL, training.ROWS * budget.steps)
    sampler = Sampler(tokenizer, mix, seed, pool)
    started = time.monotonic()
    losses = training.train(model, sampler, tokenizer.pad_token_id, budget)
    seconds = time.monotonic() - started
    accuracy = training.measure(model, tokenizer, samples_each, seed)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    return {
        "trained_on": "synthetic chats of scripts/tiny_model/chats.py; no other text",
        "train_problems": len(split_pairs("train")),
        "mix": mix.as_json(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "seed": seed,
        "steps": len(losses),
        "seconds": round(seconds),
        "optimizer": f"AdamW, learning rate {training.LEARNING_RATE}, linear decay",
        "rows_per_step": training.ROWS,
        "loss_first": _mean(losses[:20]),
        "loss_last": _mean(losses[-20:]),
        "held_out_accuracy": asdict(accuracy),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
    }


def _mean(losses: list[float]) -> float:
    return round(sum(losses) / len(losses), 4)


def main() -> None:
    args = parse()
    # More threads are many times slower for a model this small.
    torch.set_num_threads(1)
    budget = training.Budget(args.steps, args.minutes or 0.0)
    record = build(args.out, budget, Mix(noise=args.noise), args.seed, args.samples)
    text = json.dumps(record, indent=2) + "\n"
    (args.out / "training.json").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
