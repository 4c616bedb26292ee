"""The learning rate of a step: a warm-up, then tinker_cookbook's schedules above a floor."""

from __future__ import annotations

from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from tinkerscript.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, *, steps: int) -> float:
    """The rate of `step`, counted from 1, in a run of `steps`.

    During the warm-up, n / (warmup_steps + 1) of the full rate in step n; then the schedule over the steps
    that are left, and never less than `lr_floor` of the full rate. Past the end it stays where it ended.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / (warmup + 1)
    total = max(1, steps - warmup)
    done = min(step - 1 - warmup, total)
    share = compute_schedule_lr_multiplier(config.lr_schedule, done, total)
    return config.learning_rate * max(config.lr_floor, share)
