"""Sampling speed of the embedded engine against `transformers.generate`, in the same run.

    python bench/engine.py [--model FOLDER] [--rounds N]

Three workloads over the same model and prompts, one torch thread: one request at a time, 16 at once, and
64 requests of mixed lengths that arrive at random times (for `generate`: in arrival order, in batches of
what has arrived, as a server without continuous batching would). Engine and reference alternate, and the
medians and the median of the paired ratios are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tinker
import torch

from tinkerscript.config import model_folder
from tinkerscript.engine.checkpoint import load_model
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient

NEW_TOKENS = 64


@dataclass(frozen=True)
class Job:
    """One request: when it arrives (seconds from the start), its prompt, and how many tokens it wants."""

    arrives_s: float
    prompt: list[int]
    max_tokens: int


def uniform_jobs(count: int, vocabulary: int, rng: random.Random) -> list[Job]:
    return [Job(0.0, [rng.randrange(vocabulary) for _ in range(24)], NEW_TOKENS) for _ in range(count)]


def mixed_jobs(count: int, vocabulary: int, rng: random.Random) -> list[Job]:
    """Prompts of 8 to 64 ids, answers of 4 to 128, arriving over a quarter of a second."""
    jobs = [
        Job(
            arrives_s=rng.random() * 0.25,
            prompt=[rng.randrange(vocabulary) for _ in range(rng.randint(8, 64))],
            max_tokens=rng.randint(4, 128),
        )
        for _ in range(count)
    ]
    return sorted(jobs, key=lambda job: job.arrives_s)


def run_engine(client: EmbeddedSamplingClient, jobs: list[Job]) -> float:
    """Tokens per second from the first arrival to the last answer."""
    began = time.perf_counter()
    futures = []
    for job in jobs:
        _wait_until(began + job.arrives_s)
        params = tinker.SamplingParams(max_tokens=job.max_tokens, stop=[])
        futures.append(client.sample(tinker.ModelInput.from_ints(job.prompt), 1, params))
    tokens = sum(len(future.result().sequences[0].tokens) for future in futures)
    return tokens / (time.perf_counter() - began)


def run_generate(model: Any, jobs: list[Job]) -> float:
    """The same jobs through `generate`: each batch is what has arrived when the one before it ends."""
    began = time.perf_counter()
    waiting = list(jobs)
    tokens = 0
    while waiting:
        _wait_until(began + waiting[0].arrives_s)
        now = time.perf_counter() - began
        batch = [job for job in waiting if job.arrives_s <= now]
        waiting = waiting[len(batch) :]
        _generate(model, batch)
        tokens += sum(job.max_tokens for job in batch)
    return tokens / (time.perf_counter() - began)


@torch.inference_mode()
def _generate(model: Any, batch: list[Job]) -> None:
    width = max(len(job.prompt) for job in batch)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
    longest = max(job.max_tokens for job in batch)
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
    )


def _wait_until(moment: float) -> None:
    remaining = moment - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)


def compare(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> dict[str, float]:
    """Alternate the two; medians, and the median of the paired ratios."""
    ours(), theirs()  # warm-up
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return {
        "engine_tokens_per_s": round(statistics.median(a for a, _ in pairs)),
        "generate_tokens_per_s": round(statistics.median(b for _, b in pairs)),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
        "ratio_min": round(min(a / b for a, b in pairs), 2),
        "ratio_max": round(max(a / b for a, b in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = model_folder(options.model)
    model = load_model(folder)
    vocabulary = int(model.config.vocab_size)
    with EmbeddedEngine(folder, checkpoint_dir=Path(tempfile.gettempdir()), threads=1) as engine:
        client = engine.create_sampling_client().result()
        workloads = {
            "batch of 1": uniform_jobs(1, vocabulary, random.Random(1)),
            "batch of 16": uniform_jobs(16, vocabulary, random.Random(2)),
            "64 mixed, arriving at random": mixed_jobs(64, vocabulary, random.Random(3)),
        }
        for name, jobs in workloads.items():
            result = compare(
                partial(run_engine, client, jobs), partial(run_generate, model, jobs), options.rounds
            )
            print(json.dumps({"workload": name, **result}), flush=True)


if __name__ == "__main__":
    main()
