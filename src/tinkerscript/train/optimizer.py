"""The learning rate of a step: a warm-up, then tinker_cookbook's schedules above a floor.

One optimizer step, as every method makes it: gradients of all pieces, then AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tinker
from tinker.types import LossFnType
from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from tinkerscript.config import TrainingConfig
from tinkerscript.train.backends.base import TrainingClient


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


async def optimizer_step(
    client: TrainingClient,
    datums: Sequence[tinker.Datum],
    config: TrainingConfig,
    *,
    loss_fn: LossFnType,
    loss_config: Mapping[str, float] | None = None,
    learning_rate: float,
) -> dict[str, float]:
    """One step over the summed loss of `datums`, sent `config.microbatch_size` at a time.

    Returns `train/loss`, the sum, and what the engine says of the step, such as `train/grad_norm`.
    """
    size = config.microbatch_size or len(datums)
    pieces = [list(datums[i : i + size]) for i in range(0, len(datums), size)]
    # All are sent before any is waited for: a service takes them in turn.
    forwards = [client.forward_backward(piece, loss_fn, loss_config) for piece in pieces]
    optim = client.optim_step(_adam(config, learning_rate))
    losses = [(await forward).metrics["loss:sum"] for forward in forwards]
    stepped = await optim
    own = {f"train/{name}": value for name, value in (stepped.metrics or {}).items()}
    return {"train/loss": sum(losses), **own}


def _adam(config: TrainingConfig, learning_rate: float) -> tinker.AdamParams:
    return tinker.AdamParams(
        learning_rate=learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        grad_clip_norm=config.grad_clip_norm,
    )
