"""A published model beside what people would use instead, on one machine, in turn.

    python bench/real.py [--parts rl sampling training] [--threads N] [--rounds N]

SmolLM2-135M-Instruct in float32, as `examples/smollm2/fetch.py` makes it.

rl: steps of eight groups of eight on sums with a LoRA adapter of rank 16, by `tinkerscript train` (server,
trainer and worker together) and by TRL's GRPOTrainer, in turn; the median step without the first of each
process, and the peak memory of all its processes. With `--held-out`, each trains 20 steps and its adapter is
then scored on the test split, by the same code.

sampling: 1, 16 and 64 replies of 64 tokens, by the embedded engine, `transformers.generate`, vLLM's build for
processors, and llama.cpp.

training: a step on eight groups of eight, by the embedded engine and by a plain loop with PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
PARTS = ("rl", "sampling", "training")
ROWS = (1, 16, 64)
STEPS = 4
"""Of each process; the first is left out."""

HELD_OUT_STEPS = 20
EPISODES = 64
"""Of a step."""

HERE = Path(__file__).parent
PEERS = ROOT / ".venv" / "bench-peers" / "site-packages"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "smollm2"
WITH_PEERS = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PEERS, EXAMPLE)))}
READ_EVERY_S = 0.5


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Peer:
    """A program of `real_peers.py`, which answers a request at a time."""

    def __init__(self, name: str, model: Path, threads: int) -> None:
        python = str(VLLM_PYTHON) if name == "vllm" else sys.executable
        # -P: `import vllm` means the library, not bench/vllm.py.
        command = [python, "-P", str(HERE / "real_peers.py"), name, str(model), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ if name == "vllm" else WITH_PEERS,
        )
        self.name = name
        if self._read() != "ready":
            raise SystemExit(f"{name} did not start: {' '.join(command)}")

    def ask(self, **request: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def in_turn(peers: Sequence[Peer], rounds: int, **request: int) -> dict[str, list[float]]:
    """What each answers, `rounds` times, after one turn of warm-up."""
    for peer in peers:
        peer.ask(**request)
    turns = [{peer.name: peer.ask(**request) for peer in peers} for _ in range(rounds)]
    return {peer.name: [turn[peer.name] for turn in turns] for peer in peers}


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the paired ratios, with the least and the greatest."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def sampling(model: Path, options: argparse.Namespace) -> None:
    names = [name for name in ("ours", "transformers", "llama.cpp", "vllm") if name not in options.without]
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name, model, options.threads)) for name in names]
        for rows in ROWS:
            found = in_turn(peers, options.rounds, rows=rows)
            speeds = {name: round(statistics.median(each), 1) for name, each in found.items()}
            others = {
                f"ours_over_{name}": ratio(found["ours"], each)
                for name, each in found.items()
                if name != "ours"
            }
            report(sampling_rows=rows, threads=options.threads, tokens_per_s=speeds, **others)


def training(model: Path, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        names = ("ours-training", "peft-training")
        peers = [stack.enter_context(Peer(name, model, options.threads)) for name in names]
        found = in_turn(peers, options.rounds)
    ours, theirs = (found[name] for name in names)
    report(
        training_step_s={name: round(statistics.median(each), 2) for name, each in found.items()},
        threads=options.threads,
        times_as_fast=ratio(theirs, ours),
    )


class PeakMemory(threading.Thread):
    """The most memory that a process and those below it have had together. Shared pages count once."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(process)
        self.peak_mib = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(READ_EVERY_S):
            total = 0
            with suppress(psutil.Error):
                for each in [self._process, *self._process.children(recursive=True)]:
                    with suppress(psutil.Error):
                        total += each.memory_full_info().pss
            self.peak_mib = max(self.peak_mib, total // 2**20)

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.peak_mib


@contextmanager
def measured(command: list[str], log: Path) -> Generator[tuple[subprocess.Popen[str], PeakMemory]]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=WITH_PEERS, cwd=ROOT
        )
        memory = PeakMemory(process.pid)
        memory.start()
        with process:
            yield process, memory
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")


def our_steps(model: Path, folder: Path, options: argparse.Namespace, steps: int) -> list[dict[str, float]]:
    """Each step's seconds and the tokens sampled; the memory is in the first."""
    settings = {
        "experiment_dir": folder,
        "engine.model": model,
        "engine.threads": options.threads,
        "training.steps": steps,
        "evaluation.episodes": 0,
        "seed": options.seed,
    }
    command = [sys.executable, "-m", "tinkerscript", "train", str(EXAMPLE / "sums.yaml")]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with measured(command, folder.with_suffix(".log")) as (process, memory):
        process.communicate()
        peak = memory.end()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [
        {
            "seconds": sum(line[f"time/{part}_s"] for part in ("rollout", "train", "publish")),
            "tokens": line["episode_tokens/mean"] * EPISODES,
            "peak_mib": peak,
        }
        for line in lines
        if "time/train_s" in line
    ]
    assert len(found) == steps, lines
    return found


def trl_steps(model: Path, folder: Path, options: argparse.Namespace, steps: int) -> list[dict[str, float]]:
    """The same of TRL."""
    command = [sys.executable, str(HERE / "real_trl.py"), str(model), str(folder), "--steps", str(steps)]
    command += ["--threads", str(options.threads), "--seed", str(options.seed)]
    with measured(command, folder.with_suffix(".log")) as (process, memory):
        output = process.communicate()[0]
        peak = memory.end()
    return [{**json.loads(line), "peak_mib": peak} for line in output.splitlines()]


def held_out(model: Path, adapter: Path, options: argparse.Namespace) -> float:
    """The share of correct replies to the test split."""
    command = [sys.executable, str(HERE / "real_trl.py"), str(model), str(adapter), "--score"]
    command += ["--threads", str(options.threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=WITH_PEERS)
    return float(done.stdout)


def rl(model: Path, options: argparse.Namespace) -> None:
    ways = {"ours": our_steps, "trl": trl_steps}
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for way, steps in ways.items():
                found[way].append(steps(model, Path(name) / f"{way}-{number}", options, STEPS))
    seconds = {
        way: [statistics.median(step["seconds"] for step in steps[1:]) for steps in runs]
        for way, runs in found.items()
    }
    for way, runs in found.items():
        steps = [step for run in runs for step in run[1:]]
        report(
            rl=way,
            threads=options.threads,
            seconds_a_step=round(statistics.median(seconds[way]), 1),
            completions_per_s=round(EPISODES / statistics.median(seconds[way]), 2),
            tokens_a_step=round(statistics.mean(step["tokens"] for step in steps)),
            peak_mib=max(run[0]["peak_mib"] for run in runs),
        )
    memory = statistics.median(
        ours[0]["peak_mib"] / theirs[0]["peak_mib"]
        for ours, theirs in zip(found["ours"], found["trl"], strict=True)
    )
    report(times_as_fast=ratio(seconds["trl"], seconds["ours"]), memory_share=round(memory, 3))
    if options.held_out:
        equal_episodes(model, options)


def equal_episodes(model: Path, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = {way: Path(name) / way for way in ("ours", "trl")}
        began = time.perf_counter()
        our_steps(model, folders["ours"], options, HELD_OUT_STEPS)
        between = time.perf_counter()
        trl_steps(model, folders["trl"], options, HELD_OUT_STEPS)
        minutes = {"ours": between - began, "trl": time.perf_counter() - between}
        adapters = {
            "ours": folders["ours"] / "checkpoints" / f"step_{HELD_OUT_STEPS}",
            "trl": folders["trl"],
        }
        for way, adapter in adapters.items():
            report(
                held_out_after_20_steps=way,
                seed=options.seed,
                score=round(held_out(model, adapter, options), 3),
                minutes=round(minutes[way] / 60, 1),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="also train 20 steps each, and score them")
    parser.add_argument("--without", nargs="*", default=[], help="peers of sampling that are not installed")
    options = parser.parse_args()
    command = [sys.executable, str(EXAMPLE / "fetch.py")]
    model = Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    for part in options.parts:
        {"rl": rl, "sampling": sampling, "training": training}[part](model, options)


if __name__ == "__main__":
    main()
