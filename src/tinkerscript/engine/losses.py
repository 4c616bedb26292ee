"""The losses that the engine trains with: the table `LOSSES`, and `resolve_loss` for one of the user's own.

A loss is a sum over tokens, as in Tinker, so a batch may be split into microbatches in any way and its
gradients add up to the same. A new loss is one function of per-token losses and one entry of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from tinkerscript.config import import_name
from tinkerscript.errors import ConfigError, EngineError, EngineRequestError

__all__ = ["LOSSES", "ConfiguredLoss", "Loss", "TokenLosses", "resolve_loss"]

TokenLosses = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""(logprobs, inputs, settings) -> losses. One value per token, all tensors of the shape of `logprobs`
((B, T), or one axis for all tokens of a microbatch): the log probabilities that the model gives the target
tokens, float32; the datums' `loss_fn_inputs` by name, and `SEQUENCE`; and the loss of each token,
unreduced."""

SEQUENCE = "sequence"
"""The input that says which sequence a token is of: int64, from 0. All tokens of a sequence are there."""

ConfiguredLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(logprobs, inputs) -> losses."""

POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
CLIP: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the probability ratio."""


@dataclass(frozen=True, slots=True)
class Loss:
    tokens: TokenLosses

    inputs: frozenset[str] = POLICY_INPUTS
    """The `loss_fn_inputs` that a datum must have, each [T]: exactly these, `target_tokens` among them."""

    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    """The keys that `loss_fn_config` may have, with their defaults."""

    def configured(self, name: str, config: Mapping[str, float | str] | None) -> ConfiguredLoss:
        """`tokens` with the settings of `config`, a `loss_fn_config`, over the defaults.

        Raises EngineRequestError naming a key or value that cannot be used. What is returned raises
        EngineError for a loss that is not one value per token: microbatches of it would not add up.
        """
        settings = _Settings(name, {**self.settings, **_numbers(name, config or {}, known=self.settings)})

        def losses_of(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
            losses = self.tokens(logprobs, inputs, settings)
            if losses.shape != logprobs.shape:
                raise EngineError(
                    f"loss_fn {name!r} returned a tensor of shape {list(losses.shape)} for logprobs of shape "
                    f"{list(logprobs.shape)}; return the loss of each token, unreduced"
                )
            return losses

        return losses_of


class _Settings(dict[str, float]):
    def __init__(self, loss: str, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self._loss = loss

    def __missing__(self, key: str) -> float:
        raise EngineError(
            f"loss_fn {self._loss!r} reads the setting {key!r}, which it does not declare; name a "
            f"Loss(function, settings={{{key!r}: default}}) instead of the function"
        )


def _numbers(name: str, config: Mapping[str, float | str], *, known: Mapping[str, float]) -> dict[str, float]:
    unknown = set(config) - set(known)
    if unknown:
        raise EngineRequestError(
            f"loss_fn_config of {name} has unknown keys {sorted(unknown)}; it knows {sorted(known)}"
        )
    for key, value in config.items():
        if isinstance(value, str):
            raise EngineRequestError(f"loss_fn_config.{key} must be a number, got {value!r}")
    return {key: float(value) for key, value in config.items()}


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """-logprob * weight."""
    del settings
    return -logprobs * inputs["weights"]


def importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]
) -> Tensor:
    """-ratio * advantage."""
    del settings
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """-min(ratio * advantage, clip(ratio) * advantage); Schulman et al. 2017."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """-stop_gradient(clip(ratio)) * advantage * logprob; MiniMax-M1, 2025."""
    clipped = _clip(_ratio(logprobs, inputs), settings)
    return -clipped.detach() * inputs["advantages"] * logprobs


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """-min(s * advantage, clip(s) * advantage) / n; Zheng et al. 2025, arXiv:2507.18071.

    s is the ratio of a sequence, the geometric mean of the ratios of its n tokens that train.
    """
    sequence, advantages = inputs[SEQUENCE], inputs["advantages"]
    trains = advantages != 0
    gaps = torch.where(trains, logprobs - inputs["logprobs"], 0.0)
    sums = logprobs.new_zeros(2, int(sequence.max()) + 1)
    totals, counts = sums.index_add(1, sequence, torch.stack([gaps, trains.to(gaps.dtype)]))
    counts = counts.clamp(min=1)
    ratio = (totals / counts).exp()[sequence]
    bounded = torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)
    return -bounded / counts[sequence]


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Probability of each token under the current weights over that under the sampler's."""
    # Positions that do not train have advantage 0 and may hold an arbitrary logprob: keep their ratio finite.
    return torch.where(inputs["advantages"] == 0, 0.0, logprobs - inputs["logprobs"]).exp()


def _clip(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, inputs=frozenset({"target_tokens", "weights"})),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, settings=CLIP),
    "cispo": Loss(cispo, settings=CLIP),
    "gspo": Loss(gspo, settings=CLIP),
}
"""The losses by `loss_fn` name. Those that Tinker has too have its names and formulas."""


def resolve_loss(name: str) -> Loss:
    """The loss of the table, or the one that `module:name` (or `file.py:name`) names in the user's own code.

    That is a `Loss`, or a function like those above, which then takes `target_tokens`, `logprobs` and
    `advantages` and no settings. It is imported, so a name that came over a network must be looked up in
    `LOSSES` instead. Raises EngineRequestError for a name that cannot be resolved.
    """
    return LOSSES[name] if name in LOSSES else _users_loss(name)


@cache
def _users_loss(name: str) -> Loss:
    if ":" not in name:
        raise EngineRequestError(
            f"loss_fn {name!r} is not one of {', '.join(LOSSES)}; name a loss of your own as module:name or "
            "file.py:name"
        )
    try:
        found: Any = import_name(name, what="loss_fn")
    except ConfigError as error:
        raise EngineRequestError(str(error)) from error
    loss: Any = Loss(cast("TokenLosses", found)) if callable(found) else found
    if not isinstance(loss, Loss) or "target_tokens" not in loss.inputs:
        raise EngineRequestError(
            f"loss_fn {name!r} is {found!r}; it must be a function of per-token losses, or a "
            "tinkerscript.engine.losses.Loss whose inputs have target_tokens"
        )
    return loss
