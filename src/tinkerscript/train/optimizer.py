"""One optimizer step, as every method makes it: gradients of all pieces, then AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tinker
from tinker.types import LossFnType

from tinkerscript.config import TrainingConfig
from tinkerscript.engine.clients import TrainingClient


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
