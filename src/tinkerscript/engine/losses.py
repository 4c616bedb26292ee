"""Tinker's loss functions over one padded microbatch.

All are sums over tokens, as Tinker's are, so that a batch may be split in any way and its gradients
accumulate to the same. Shapes (B, T): row b, position t predicts target_tokens[b, t].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkerscript.errors import EngineRequestError

REQUIRED_INPUTS: Mapping[str, frozenset[str]] = {
    "cross_entropy": frozenset({"target_tokens", "weights"}),
    "importance_sampling": frozenset({"target_tokens", "logprobs", "advantages"}),
    "ppo": frozenset({"target_tokens", "logprobs", "advantages"}),
    "cispo": frozenset({"target_tokens", "logprobs", "advantages"}),
}
"""Loss function -> the `loss_fn_inputs` that a Datum must have, each [T]; others are refused."""

CONFIG_KEYS: Mapping[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    "ppo": frozenset({"clip_low_threshold", "clip_high_threshold"}),
    "cispo": frozenset({"clip_low_threshold", "clip_high_threshold"}),
}
DEFAULT_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Thresholds of the probability ratio."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss function with its checked configuration."""

    name: str
    clip_low: float
    clip_high: float


def loss_settings(name: str, config: Mapping[str, float | str] | None) -> LossSettings:
    """Check `loss_fn` and `loss_fn_config`; raises EngineRequestError naming what is unknown."""
    if name not in REQUIRED_INPUTS:
        raise EngineRequestError(f"loss_fn {name!r} is not one of {', '.join(sorted(REQUIRED_INPUTS))}")
    unknown = set(config or {}) - CONFIG_KEYS[name]
    if unknown:
        raise EngineRequestError(
            f"loss_fn_config of {name} has unknown keys {sorted(unknown)}; "
            f"it knows {sorted(CONFIG_KEYS[name])}"
        )
    values = dict(DEFAULT_CLIP)
    for key, value in (config or {}).items():
        if isinstance(value, str):
            raise EngineRequestError(f"loss_fn_config.{key} must be a number, got {value!r}")
        values[key] = value
    return LossSettings(name, values["clip_low_threshold"], values["clip_high_threshold"])


def token_losses(settings: LossSettings, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Per-token losses (B, T) from the model's log probabilities of the targets (B, T).

    r = exp(logprobs - sampling logprobs), A = advantages:
    cross_entropy -logprob * weight; importance_sampling -r A; ppo -min(r A, clip(r) A)
    (Schulman et al. 2017); cispo -stop_gradient(clip(r)) A logprob (MiniMax-M1, 2025).
    """
    if settings.name == "cross_entropy":
        return -logprobs * inputs["weights"]
    advantages = inputs["advantages"]
    # Positions that do not train have advantage 0 and may hold any old logprob: keep their ratio finite.
    log_ratio = torch.where(advantages == 0, 0.0, logprobs - inputs["logprobs"])
    ratio = log_ratio.exp()
    if settings.name == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(settings.clip_low, settings.clip_high)
    if settings.name == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages)
    return -clipped.detach() * advantages * logprobs
