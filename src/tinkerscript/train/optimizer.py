"""One optimizer step, for every method: the learning rate of the step, summed gradients, AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tinker
from tinker.types import LossFnType
from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from tinkerscript.config import TrainingConfig
from tinkerscript.train.backends.backend import TrainingClient


def learning_rate(config: TrainingConfig, step: int, *, steps: int) -> float:
    """The rate of `step`, counted from 1, in a run of `steps`.

    Step n of the warm-up has n / (warmup_steps + 1) of the full rate. After it comes tinker_cookbook's
    schedule over the remaining steps, never below `lr_floor` of the full rate. Steps past the end keep the
    last rate.
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
    """One AdamW step on the summed loss of `datums`, sent `config.microbatch_size` at a time.

    Returns `train/loss`, the sum, and the engine's own metrics of the step, such as `train/grad_norm`.
    """
    size = config.microbatch_size or len(datums)
    pieces = [list(datums[i : i + size]) for i in range(0, len(datums), size)]
    # Send everything before awaiting anything: a service executes the calls in order.
    forwards = [client.forward_backward(piece, loss_fn, loss_config) for piece in pieces]
    optim = client.optim_step(
        tinker.AdamParams(
            learning_rate=learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )
    )
    losses = [(await forward).metrics["loss:sum"] for forward in forwards]
    stepped = await optim
    own = {f"train/{name}": value for name, value in (stepped.metrics or {}).items()}
    return {"train/loss": sum(losses), **own}
