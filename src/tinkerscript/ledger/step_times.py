"""Where training steps spend their time (`step_times`), and which config key would help most.

The wait for old groups is measured. Other waiting is split between model calls and programs as running
episodes split their time.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from tinkerscript.ledger.health import JUDGED_STEPS
from tinkerscript.ledger.reader import LedgerReader

NAMES = ("rollout", "train", "publish", "sample", "wait_stale")

# From this share of the time, waiting for old groups is worth a change.
MUCH = 0.1

# Overlapping pays if sampling and training each take this share.
TURNS = 0.2


class StepTimes(BaseModel):
    train: float
    publish: float
    sample: float = Field(
        description="Waiting while model calls run. The next field is the wait while programs run."
    )
    programs: float
    old_groups: float = Field(description="Waiting for groups that would otherwise become too old.")
    words: str = Field(description="The bottleneck, and the key to change.")


def step_times(ledger: LedgerReader) -> StepTimes | None:
    """Return None before the first step, and for runs that do not measure model calls."""
    query = """
        SELECT name, sum(value) FROM metrics WHERE undone = 0 AND name IN (?, ?, ?, ?, ?)
        AND step > (SELECT max(step) FROM steps WHERE undone = 0) - ? GROUP BY name
    """
    rows = ledger.rows(query, (*(f"time/{name}_s" for name in NAMES), JUDGED_STEPS))
    found = {name.removeprefix("time/").removesuffix("_s"): float(value) for name, value in rows}
    whole = found.get("rollout", 0.0) + found.get("train", 0.0)
    if "sample" not in found or not whole:
        return None
    old = found.get("wait_stale", 0.0)
    sample = min(found["sample"], found["rollout"] - old)
    times = StepTimes(
        train=(found["train"] - found["publish"]) / whole,
        publish=found["publish"] / whole,
        sample=sample / whole,
        programs=(found["rollout"] - old - sample) / whole,
        old_groups=old / whole,
        words="",
    )
    lag = ledger.setting("training", "max_policy_lag")
    return times.model_copy(update={"words": _words(times, overlaps=bool(lag))})


def _words(times: StepTimes, *, overlaps: bool) -> str:
    waiting = times.sample + times.programs
    if times.old_groups > MUCH:
        return (
            f"Steps wait {times.old_groups:.0%} of the time for groups that would become too old: raise "
            "training.max_policy_lag, or set training.on_stale: drop."
        )
    if not overlaps and min(waiting, times.train) > TURNS:
        return (
            f"Rollouts ({waiting:.0%}) and training ({times.train:.0%}) take turns: "
            "training.max_policy_lag: 1 lets them overlap."
        )
    said = {
        "sample": "Model calls are the bottleneck: sample with more replicas (inference.launch.replicas), a "
        "larger engine.max_batch, or shorter replies (sampling.max_tokens).",
        "programs": "The episodes' own programs are the bottleneck: raise workers.count or "
        "workers.concurrency, if their machines have room.",
        "train": "Training is the bottleneck: train on more devices (engine.devices), or take fewer "
        "optimizer steps (training.minibatches, training.epochs_per_batch).",
        "publish": "Publishing the weights is the bottleneck: an adapter is smaller (engine.lora.rank).",
    }
    return said[max(said, key=lambda name: getattr(times, name))]
