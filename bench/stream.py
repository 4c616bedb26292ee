"""What groups that stream gain on episodes of very unequal length: a simulation.

Server, ledger, loop and workers are the real ones; the engine only sleeps.

    python bench/stream.py [--laws log_normal ...] [--lags 0 1 2 4 8] [--steps N] [--scale SECONDS]
        [--train SECONDS] [--concurrency N] [--failing SHARE] [--kill-every SECONDS] [--set KEY=VALUE ...]

`--set` changes the config, as `tinkerscript train --set` does. With PYTHONPATH=OTHER/src the command measures
another checkout.

A second of the simulation takes `--scale` seconds of the clock. The laws are those of `slow_rollout.py`. Each
line has, from the end of the first step to that of the last:

- `steps_per_s`, of the simulation, and `of_bound`: its share of what the slower side could do if it never
  waited, sampling with `--concurrency` episodes at once or training;
- `of_allowed`: its share of what the same episodes allow at this lag. However they are scheduled, a group has
  to end before the last step that it may train in begins (see `allowed`);
- `idle`, the share of the time in which no step trained, and `wait_stale`, that in which a step waited for
  old groups;
- `lags`: episodes by the age of the oldest weights that sampled them; `discarded`: those that had a result
  and did not train;
- `long_trained`: of the longest twentieth of what started early enough to train, how much did; and `ks`, the
  Kolmogorov-Smirnov distance of the durations that trained from those that started, with its 5% limit;
- `start_to_training`: the median time from an episode's start to the end of its step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import psutil
import tinker
from rich.console import Console

from slow_rollout import seconds_of
from tinkerscript.config import RunConfig, parse_config
from tinkerscript.dashboard.terminal import LineReporter
from tinkerscript.rollouts.call import pack_ids, pack_logprobs
from tinkerscript.sampler import ProgressCallback, SampledSequence, Sampler, SampleRequest
from tinkerscript.train.backends import BACKENDS
from tinkerscript.train.backends.backend import FrozenSampler
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.run import run_training

ROOT = Path(__file__).parents[1]
GROUPS, GROUP_SIZE = 8, 8
LOGPROB = -1.0
LAWS = ("constant", "log_normal", "limited", "bimodal")


class SleepingClient:
    """Trains nothing, for as long as it is told to."""

    train_s = 0.0

    def __init__(self, client: Any) -> None:
        self._client = client

    async def forward(self, data: list[tinker.Datum], *_: Any) -> tinker.ForwardBackwardOutput:
        lengths = [each.model_input.length for each in data]
        names = {"logprobs": LOGPROB, "entropies": 1.0}
        rows = [
            {
                name: tinker.TensorData.from_numpy(np.full(n, value, np.float32))
                for name, value in names.items()
            }
            for n in lengths
        ]
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=rows, metrics={"loss:sum": 0.0}
        )

    async def forward_backward(
        self, data: list[tinker.Datum], *_: Any, entropies: bool = False
    ) -> tinker.ForwardBackwardOutput:
        await asyncio.sleep(self.train_s)
        return await self.forward(data)

    async def optim_step(self, _: tinker.AdamParams) -> tinker.types.OptimStepResponse:
        return tinker.types.OptimStepResponse(metrics={})

    def save_state(self, name: str) -> Any:
        return self._client.save_state(name)


class SleepingSampler(FrozenSampler):
    """Answers everything at once."""

    async def _sequences(
        self, request: SampleRequest, params: tinker.SamplingParams, progress: ProgressCallback | None
    ) -> list[SampledSequence]:
        ids, logprobs = pack_ids([0, 1]), pack_logprobs([LOGPROB, LOGPROB])
        return [SampledSequence(sampled=ids, logprobs=logprobs, stop_reason="length")]


class SleepingBackend(EmbeddedBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client = SleepingClient(self._client)

    async def publish(self, policy_version: int) -> Sampler:
        return SleepingSampler(policy_version)


def config_of(folder: Path, lag: int, options: argparse.Namespace) -> RunConfig:
    return parse_config(
        json.dumps(
            {
                "experiment_dir": str(folder),
                "interchange_server": {"interchange_server_port": 0},
                "task": {
                    "name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
                    "train_args": {"split": "train"},
                    "eval_args": {"split": "test"},
                },
                "training": {
                    "steps": options.steps,
                    "groups_per_step": GROUPS,
                    "group_size": GROUP_SIZE,
                    "max_policy_lag": lag,
                    "checkpoint_every": 0,
                },
                "evaluation": {"episodes": 0},
                "workers": {
                    "count": options.workers,
                    "concurrency": options.concurrency // options.workers,
                    "script": str(ROOT / "bench" / "slow_rollout.py"),
                },
            }
        ),
        source="bench/stream.py",
        overrides=options.settings,
    )


def kill_workers(every_s: float, ended: threading.Event) -> None:
    """One after the other; the run starts them again."""
    while not ended.wait(every_s):
        workers = [
            each for each in psutil.Process().children(recursive=True) if "slow_rollout.py" in _command(each)
        ]
        if workers:
            with suppress(psutil.Error):
                random.choice(workers).kill()


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def simulate(law: str, lag: int, options: argparse.Namespace) -> dict[str, Any]:
    os.environ["SLOW_ROLLOUT"] = f"{law} {options.scale} {options.failing}"
    SleepingClient.train_s = options.train * options.scale
    ended = threading.Event()
    if options.kill_every:
        threading.Thread(target=kill_workers, args=(options.kill_every, ended), daemon=True).start()
    with tempfile.TemporaryDirectory() as name, patch.dict(BACKENDS, embedded=lambda: SleepingBackend):
        folder = Path(name) / "run"
        asyncio.run(run_training(config_of(folder, lag, options), LineReporter(Console(quiet=True))))
        ended.set()
        return measured(folder, law, lag, options)


class Simulated(NamedTuple):
    """One episode of the ledger."""

    uuid: str
    group: str
    step: int
    """The first that could train on it."""

    state: str
    claimed_at: float
    trained: int | None
    """The step that did."""

    oldest: int | None
    """Steps behind the oldest weights that sampled it."""


QUERY = """
SELECT e.uuid, e.group_id, e.step, e.state, min(a.claimed_at),
    (SELECT max(t.step) FROM trained AS t WHERE t.episode = e.sequence AND t.outcome = 'trained'),
    (SELECT min(p.step) FROM calls AS c JOIN publications AS p USING (policy_version)
        WHERE c.episode = e.sequence)
FROM episodes AS e JOIN attempts AS a ON a.episode = e.sequence GROUP BY e.sequence
"""


def measured(folder: Path, law: str, lag: int, options: argparse.Namespace) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "time/train_s" in line][1:]
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        steps = dict(ledger.execute("SELECT step, time FROM steps WHERE undone = 0"))
        episodes = [Simulated(*row) for row in ledger.execute(QUERY)]
    first, last = min(steps), max(steps)
    seconds = (steps[last] - steps[first]) / options.scale
    rate = (last - first) / seconds
    drawn = [seconds_of(f"{number}", law) for number in range(100_000)]
    bound = min(
        1 / options.train if options.train else float("inf"),
        options.concurrency / statistics.mean(drawn) / (GROUPS * GROUP_SIZE),
    )
    durations = {each.uuid: seconds_of(each.uuid, law) for each in episodes}
    groups = dict[str, Simulated]()
    for each in episodes:
        longest = groups.setdefault(each.group, each)
        if durations[each.uuid] > durations[longest.uuid]:
            groups[each.group] = each
    started = dict[int, list[float]]()
    for each in groups.values():
        started.setdefault(each.step - 1, []).append(durations[each.uuid])
    fastest = allowed(started, lag, options.train, last)
    # What started late had no time to train: it would count against long episodes.
    early = [each for each in episodes if each.step <= last - options.margin]
    trained = [each for each in early if each.trained]
    limit = np.quantile([durations[each.uuid] for each in early], 0.95)
    long = [each for each in early if durations[each.uuid] >= limit]
    found, everything = ([durations[each.uuid] for each in some] for some in (trained, early))
    took = [(steps[each.trained] - each.claimed_at) / options.scale for each in trained if each.trained]
    lags = Counter(each.trained - 1 - (each.oldest or 0) for each in trained if each.trained)
    waited = sum(line.get("time/wait_stale_s", 0) for line in counted) / options.scale
    train_s = sum(line["time/train_s"] + line["time/publish_s"] for line in counted) / options.scale
    return {
        "steps_per_s": round(rate, 4),
        "of_bound": round(rate / bound, 3),
        "of_allowed": round((fastest[last] - fastest[first]) / seconds, 3),
        "idle": round(1 - train_s / seconds, 2),
        "wait_stale": round(waited / seconds, 2),
        "lags": dict(sorted(lags.items())),
        "discarded": sum(each.state == "ended" and not each.trained for each in early),
        "long_trained": round(sum(bool(each.trained) for each in long) / len(long), 3),
        "ks": round(distance(found, everything), 3),
        "ks_limit": round(1.358 * (1 / len(found) + 1 / len(everything)) ** 0.5, 3),
        "start_to_training": round(statistics.median(took), 1),
    }


def allowed(started: Mapping[int, list[float]], lag: int, train: float, last: int) -> list[float]:
    """When the weights of each step up to `last` are published at the earliest, if nothing costs time but
    episodes and training. `started`: steps behind the newest weights -> how long the groups last that started
    then.

    A step begins once the one before it is published, as many groups have ended as have to train by then, and
    so have all that started with the weights of `lag` + 1 steps before it: it is the last for them.
    """
    published, ends = [0.0], list[float]()
    for step in range(1, last + 1):
        for seconds in started.get(step - 1, ()):
            insort(ends, published[-1] + seconds)
        began = max(published[-1], ends[: step * GROUPS][-1])
        if due := started.get(step - 1 - lag):
            began = max(began, published[step - 1 - lag] + max(due))
        published.append(began + train)
    return published


def drawn_groups(law: str, lag: int, steps: int) -> dict[int, list[float]]:
    """How long those last that would start in a run, by the steps behind the newest weights."""
    started = dict[int, list[float]]()
    for number in range(steps * GROUPS):
        members = (seconds_of(f"{number}/{member}", law) for member in range(GROUP_SIZE))
        started.setdefault(max(0, number // GROUPS - lag), []).append(max(members))
    return started


def distance(some: list[float], others: list[float]) -> float:
    """Kolmogorov-Smirnov's: the largest difference of the two distribution functions."""
    values = np.sort(np.array(some + others))
    left, right = (
        np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (some, others)
    )
    return float(np.abs(left - right).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=["log_normal"])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument(
        "--train", type=float, default=20.0, help="seconds of the simulation that a step trains"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--failing", type=float, default=0.0)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds of the clock; 0: never")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--margin", type=int, default=4, help="steps at the end whose episodes do not count")
    parser.add_argument(
        "--only-allowed", action="store_true", help="run nothing, and print what drawn episodes allow"
    )
    options = parser.parse_args()
    for law in options.laws:
        for lag in options.lags:
            if options.only_allowed:
                published = allowed(drawn_groups(law, lag, options.steps), lag, options.train, options.steps)
                share = (options.steps - 1) * options.train / (published[-1] - published[1])
                print(json.dumps({"law": law, "max_policy_lag": lag, "allowed_of_bound": round(share, 3)}))
                continue
            began = time.monotonic()
            found = simulate(law, lag, options)
            print(json.dumps({"law": law, "max_policy_lag": lag, **found}), flush=True)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
