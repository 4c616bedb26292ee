"""Speed and memory of the embedded engine, beside plain Hugging Face and the machine, in one run.

    python bench/engine.py [--rounds N] [--models tiny 20m] [--parts machine sampling training memory]

One torch thread. Ours and the reference alternate; medians, and the median of the paired ratios, are printed
as JSON. Speeds are tokens a second of processor time, which on an idle machine is the time on the clock; of
requests that arrive over time (`64 mixed`) they are by the clock.

Sampling, against `transformers.generate`: one request, 16 at once, 64 of mixed lengths that arrive at random
times (for `generate`: in batches of what has arrived, as a server without continuous batching would), and two
groups of 16 with prompts of 256 ids and answers of 16, a group with one prompt or every request with its own.
Training, against a plain step: groups of 16 (prompts of 256, answers of 8 to 24; prompts of 64, answers of 64
to 128) with and without sharing of prefixes, and ragged lengths from 8 to 512. Tokens of training are those
of the data, however few of them are computed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models import make_model, matrix_rate, measured, processor_seconds, read_bandwidth
from sampling_speed import group_jobs, mixed_jobs, run_engine, run_generate, uniform_jobs
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import load_model
from tinkerscript.model_folder import TINY_MODEL
from training_speed import computed_tokens, grouped, ragged, step_of, tokens_of

PARTS = ("machine", "sampling", "training", "memory")


def by_processor(run: Callable[[], float]) -> float:
    """Tokens a second of processor time, of a run that returns tokens a second by the clock."""
    began_wall, began = time.perf_counter(), time.process_time()
    rate = run()
    return rate * (time.perf_counter() - began_wall) / (time.process_time() - began)


def alternate(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every run in turn, `rounds` times, after one turn of warm-up."""
    for run in runs.values():
        run()
    turns = [{name: run() for name, run in runs.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in runs}


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the paired ratios, with the least and the greatest."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def sampling(name: str, folder: Path, rounds: int, flops: float, bandwidth: float) -> None:
    model: Any = load_model(folder)
    vocabulary, parameters = int(model.config.vocab_size), sum(p.numel() for p in model.parameters())
    workloads = {
        "batch of 1": uniform_jobs(1, vocabulary, random.Random(1)),
        "batch of 16": uniform_jobs(16, vocabulary, random.Random(2)),
        "64 mixed, arriving at random": mixed_jobs(64, vocabulary, random.Random(3)),
        "2 groups of 16, one prompt each": group_jobs(2, vocabulary, random.Random(4), same_prompt=True),
        "2 groups of 16, prompts not shared": group_jobs(2, vocabulary, random.Random(4), same_prompt=False),
    }
    with EmbeddedEngine(folder, checkpoint_dir=folder / "none", threads=1) as engine:
        training = engine.create_training_client()
        for workload, jobs in workloads.items():
            clock = "mixed" in workload

            def ours(jobs: Any = jobs) -> float:
                # A new client each time: prompts of the round before are forgotten.
                return run_engine(training.save_weights_and_get_sampling_client().result(), jobs)

            theirs = partial(run_generate, model, jobs)
            runs = {"engine": ours if clock else partial(by_processor, ours)}
            runs["generate"] = theirs if clock else partial(by_processor, theirs)
            speeds = alternate(runs, rounds)
            speed = statistics.median(speeds["engine"])
            steps = speed / len(jobs)
            report(
                model=name,
                sampling=workload,
                engine_tokens_per_s=round(speed),
                generate_tokens_per_s=round(statistics.median(speeds["generate"])),
                ratio=ratio(speeds["engine"], speeds["generate"]),
                share_of_matrix_rate=round(2 * parameters * speed / flops, 2),
                share_of_bandwidth=None if clock else round(4 * parameters * steps / bandwidth, 2),
            )


def training(name: str, folder: Path, rounds: int, flops: float) -> None:
    vocabulary = int(load_model(folder).config.vocab_size)
    groups = 4 if name == "tiny" else 1
    workloads = {
        "groups of 16, prompt 256, answers 8-24": grouped(groups, vocabulary, prompt=256, answers=(8, 24)),
        "groups of 16, prompt 64, answers 64-128": grouped(groups, vocabulary, prompt=64, answers=(64, 128)),
        "ragged, 8-512": ragged(16 * groups, vocabulary),
    }
    for workload, data in workloads.items():
        steps = {kind: step_of(kind, load_model(folder)) for kind in ("shared", "plain", "hugging_face")}
        tokens = tokens_of(data)

        def speed(step: Any, data: Any = data, tokens: int = tokens) -> float:
            return tokens / processor_seconds(lambda: step(data))

        speeds = alternate({kind: partial(speed, step) for kind, step in steps.items()}, rounds)
        model: Any = load_model(folder)
        computed = computed_tokens(model, data)
        work = 6 * sum(p.numel() for p in model.parameters())
        medians = {kind: statistics.median(values) for kind, values in speeds.items()}
        report(
            model=name,
            training=workload,
            **{f"{kind}_tokens_per_s": round(value) for kind, value in medians.items()},
            tokens=tokens,
            computed_when_shared=computed,
            shared_over_plain=ratio(speeds["shared"], speeds["plain"]),
            shared_over_hugging_face=ratio(speeds["shared"], speeds["hugging_face"]),
            plain_over_hugging_face=ratio(speeds["plain"], speeds["hugging_face"]),
            share_of_matrix_rate={
                "shared": round(work * medians["shared"] * computed / tokens / flops, 2),
                "plain": round(work * medians["plain"] / flops, 2),
            },
        )


def memory(name: str, folder: Path) -> None:
    for kind in ("shared", "plain", "hugging_face"):
        command = [sys.executable, str(Path(__file__).with_name("training_speed.py")), str(folder), kind]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        before, after = map(int, output.split())
        report(model=name, memory=kind, mib_before=before, mib_peak=after, step_mib=after - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("tiny", "20m"), default=("tiny", "20m"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    flops, bandwidth = measured(matrix_rate, 7), measured(read_bandwidth, 7)
    report(machine="one thread", gflops=round(flops / 1e9, 1), read_gb_per_s=round(bandwidth / 1e9, 1))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"tiny": TINY_MODEL}
        if "20m" in options.models:
            folders["20m"] = make_model(Path(scratch) / "20m")
        for name in options.models:
            if "sampling" in options.parts:
                sampling(name, folders[name], options.rounds, flops, bandwidth)
            if "training" in options.parts:
                training(name, folders[name], options.rounds, flops)
            if "memory" in options.parts:
                memory(name, folders[name])


if __name__ == "__main__":
    main()
