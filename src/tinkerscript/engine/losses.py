"""The losses that the engine trains with: the table `LOSSES`, `resolve_loss` for one of the user's own, and
`target_logprobs`, the log probabilities that they take.

A loss is a sum over tokens, as in Tinker, so a batch may be split into microbatches in any way and its
gradients add up to the same. A new loss is one function of per-token losses and one entry of the table.

Invariant: logits are held in chunks, and nothing but the log probabilities of the targets leaves a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tinkerscript.config import import_name
from tinkerscript.engine.decoder import backbone_output, head_logits, logits_rows, redirected, text_config_of
from tinkerscript.errors import ConfigError, EngineError, EngineRequestError

__all__ = ["LOSSES", "ConfiguredLoss", "Loss", "TokenLosses", "resolve_loss", "target_logprobs"]

TokenLosses = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""(logprobs, inputs, settings) -> losses. One value per token, all tensors of the shape of `logprobs`
((B, T), or one axis for all tokens of a microbatch): the log probabilities that the model gives the target
tokens, float32, at the temperature that they were sampled at; the datums' `loss_fn_inputs` by name, `MASK`,
and `SEQUENCE`; and the loss of each token, unreduced."""

MASK = "mask"
"""The input that says which tokens train: bool. A datum may bring it; without it these are the tokens with an
advantage or a weight."""

SEQUENCE = "sequence"
"""The input that says which sequence a token is of: int64, from 0. All tokens of a sequence are there."""

TEMPERATURES = "temperatures"
"""What the logits of each token are divided by: float32, above 0. A datum may bring it; without it all are 1.
Losses do not see it: their log probabilities have it in them."""

OPTIONAL_INPUTS = frozenset({MASK, TEMPERATURES})

SKIPPED_STEPS = "skipped_steps"
"""The metric of an optimizer step that was not taken, because the gradient was not finite."""

ConfiguredLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(logprobs, inputs) -> losses."""

POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
CLIP: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the probability ratio of a token."""

SEQUENCE_CLIP: Mapping[str, float] = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
"""Bounds of the ratio of a sequence, a mean that hardly moves: those of GSPO's authors."""

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios are clamped to this on both sides, as verl does: the exponential of 89 is infinite in
float32, and infinity times a gradient of 0 would be NaN."""


@dataclass(frozen=True, slots=True)
class Loss:
    tokens: TokenLosses

    inputs: frozenset[str] = POLICY_INPUTS
    """The `loss_fn_inputs` that a datum must have, each [T]: these, `target_tokens` among them, and any of
    `OPTIONAL_INPUTS`."""

    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    """The keys that `loss_fn_config` may have, with their defaults."""

    ratio: Literal["token", "sequence"] = "token"
    """Whether each token has a probability ratio of its own, or that of its sequence. Only for the metric
    `train/clip_fraction` of losses with the settings of `CLIP`."""

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
    """-min(s_t * advantage, clip(s_t) * advantage) / n; GSPO-token of Zheng et al. 2025, arXiv:2507.18071.

    s is the ratio of a sequence, the geometric mean of the ratios of its n tokens that train. s_t has the
    value of s and the gradient of its own token, so that each token has its own advantage.
    """
    sequence, mask, advantages = inputs[SEQUENCE], inputs[MASK], inputs["advantages"]
    gaps = torch.where(mask, logprobs.detach() - inputs["logprobs"], 0.0)
    sums = logprobs.new_zeros(2, int(sequence.max()) + 1)
    totals, counts = sums.index_add(1, sequence, torch.stack([gaps, mask.to(gaps.dtype)]))
    counts = counts.clamp(min=1)
    ratio = _exp((totals / counts)[sequence] + logprobs - logprobs.detach())
    bounded = torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)
    return -bounded / counts[sequence]


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """-(logprob * advantage - beta / 2 * (logprob - sampler's)^2); Richemond et al. 2024, arXiv:2405.19107.

    The advantage is meant to be a soft one, r - beta * log E exp(r / beta).
    """
    gaps = torch.where(inputs[MASK], logprobs - inputs["logprobs"], 0.0)
    return settings["beta"] / 2 * gaps.square() - logprobs * inputs["advantages"]


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Probability of each token under the current weights over that under the sampler's."""
    # Positions that do not train may hold an arbitrary logprob: their ratio is 1.
    return _exp(torch.where(inputs[MASK], logprobs - inputs["logprobs"], 0.0))


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, inputs=frozenset({"target_tokens", "weights"})),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, settings=CLIP),
    "cispo": Loss(cispo, settings=CLIP),
    "gspo": Loss(gspo, settings=SEQUENCE_CLIP, ratio="sequence"),
    "dro": Loss(dro, settings={"beta": 0.05}),
}
"""The losses by `loss_fn` name. Those that Tinker has too have its names and formulas, but that `gspo` is
divided by n."""


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


def target_logprobs(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    places: NDArray[np.int64],
    targets: Tensor,
    *,
    temperatures: NDArray[np.float32] | None = None,
    rows: int | None = None,
    with_entropies: bool = False,
) -> Tensor:
    """Log probabilities (S,) of targets (S,), float32 or wider, each after the token at its place.

    temperatures: [S], what the logits are divided by; None: nothing.

    with_entropies: returns (2, S), the second row of which has the entropies, in nats, of the distributions
        that the targets are of, without gradients.

    inputs: of the model's forward pass, B rows of N tokens.
    places: [S] among the B * N tokens; several targets may follow the same token.
    rows: how many tokens' logits are held at once. None: as many as `logits_rows` says. Where the tokens are
        more, the backward pass computes the logits of each chunk again.

    Everything runs inside a call of `model`, as FSDP requires of its root module.
    """
    of_chunk = _with_entropies if with_entropies else _TargetLogprobs.apply
    if temperatures is not None and (temperatures == 1).all():
        temperatures = None
    with redirected(model, partial(_forward, model, inputs, places, targets, temperatures, rows, of_chunk)):
        return model()


def _forward(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    places: NDArray[np.int64],
    targets: Tensor,
    temperatures: NDArray[np.float32] | None,
    rows: int | None,
    of_chunk: Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor],
) -> Tensor:
    """`of_chunk`: logits (n, V), temperatures (n,), places (s,) in [0, n), targets (s,) -> (s,), or several
    rows of it."""
    output = backbone_output(model, **inputs)
    hidden = output.last_hidden_state.flatten(0, 1)  # (B * N, C)
    device = hidden.device
    scale = None
    if temperatures is not None:
        # A row for each token and temperature: a token that sequences share may have several.
        pairs, places = np.unique(np.stack([places, temperatures]), axis=1, return_inverse=True)
        places = places.reshape(-1)
        hidden = hidden[torch.from_numpy(pairs[0].astype(np.int64)).to(device)]
        scale = torch.from_numpy(pairs[1].astype(np.float32)).to(device)
    chunks = -(-len(hidden) // (rows or logits_rows(text_config_of(model).vocab_size, device)))

    def logprobs(part: Tensor, scale: Tensor | None, own: Tensor, ids: Tensor) -> Tensor:
        return of_chunk(head_logits(model, output, part[None])[0], scale, own, ids)

    if chunks == 1:
        return logprobs(hidden, scale, torch.from_numpy(places).to(device), targets)
    order = np.argsort(places, kind="stable")
    parts = hidden.tensor_split(chunks)
    scales = [None] * chunks if scale is None else scale.tensor_split(chunks)
    begins = np.cumsum([0, *(len(part) for part in parts)])
    found: list[Tensor] = []
    for part, scale, begin, members in zip(
        parts, scales, begins, np.split(order, np.searchsorted(places[order], begins[1:-1])), strict=False
    ):
        own, which = (torch.from_numpy(each).to(device) for each in (places[members] - begin, members))
        ids = targets[which]
        chunk = checkpoint(logprobs, part, scale, own, ids, use_reentrant=False, preserve_rng_state=False)
        found.append(chunk)
    return torch.cat(found, -1)[..., torch.from_numpy(np.argsort(order)).to(device)]


class _TargetLogprobs(torch.autograd.Function):
    """(logits / temperatures).log_softmax(-1)[places, targets]. Backward makes one tensor of the size of the
    logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperatures: Tensor | None, places: Tensor, targets: Tensor
    ) -> Tensor:
        """Logits (n, V), temperatures (n,), places (s,) in [0, n), targets (s,) -> (s,), float32 or wider."""
        wide = _scaled(logits, temperatures)
        normalizers = wide.logsumexp(-1)  # Once per token, however many sequences share it.
        ctx.save_for_backward(logits, temperatures, normalizers, places, targets)
        return wide[places, targets] - normalizers[places]

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, temperatures, normalizers, places, targets = ctx.saved_tensors
        by_token = torch.zeros_like(normalizers).index_add_(0, places, gradient)
        result = logits.to(normalizers.dtype, copy=True)
        if temperatures is not None:
            result.div_(temperatures[:, None])
        result.sub_(normalizers[:, None]).exp_().mul_(-by_token[:, None])
        result.index_put_((places, targets), gradient, accumulate=True)
        if temperatures is not None:
            result.div_(temperatures[:, None])
        return result.to(logits.dtype), None, None, None


def _with_entropies(logits: Tensor, temperatures: Tensor | None, places: Tensor, targets: Tensor) -> Tensor:
    """Log probabilities and entropies: (2, s)."""
    if torch.is_grad_enabled():
        logprobs: Any = _TargetLogprobs.apply(logits, temperatures, places, targets)
        with torch.no_grad():  # After what `checkpoint` computes again.
            entropies = _with_entropies(logits, temperatures, places, targets)[1]
        return torch.stack([logprobs, entropies])
    wide = _scaled(logits, temperatures)
    normalizers = wide.logsumexp(-1)
    entropies = torch.special.entr((wide - normalizers[:, None]).exp_()).sum(-1)
    return torch.stack([wide[places, targets] - normalizers[places], entropies[places]])


def _scaled(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    """Logits (n, V), float32 or wider, over temperatures (n,), as the sampler divides them."""
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return wide if temperatures is None else wide / temperatures[:, None]
