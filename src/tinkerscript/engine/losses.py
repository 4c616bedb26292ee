"""The losses of training (`LOSSES`), and the logprobs that they take (`target_logprobs`).

docs/training.md#losses has the formulas, docs/recipes.md the papers. A loss is a sum over tokens, as in
Tinker, so gradients do not depend on microbatches. Logits exist only in chunks.
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

from tinkerscript.config import KL_LOSSES, import_name
from tinkerscript.engine.decoder import backbone_output, head_logits, logits_rows, text_config_of
from tinkerscript.engine.routing import redirected
from tinkerscript.errors import ConfigError, EngineError, EngineRequestError

__all__ = ["LOSSES", "TERMS", "ConfiguredLoss", "Loss", "TokenLosses", "resolve_loss", "target_logprobs"]

TokenLosses = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""(logprobs, inputs, settings) -> losses, unreduced.

All tensors are (B, T), or have one axis for a microbatch's tokens. `logprobs` are the model's for the
targets, float32, at their sampling temperatures. `inputs`: the datums' `loss_fn_inputs`, plus `MASK` and
`SEQUENCE`.
"""

MASK = "mask"
"""bool: tokens that train. By default those with an advantage or a weight."""

SEQUENCE = "sequence"
"""int64 from 0: the token's sequence."""

TEMPERATURES = "temperatures"
"""float32: divides each token's logits before losses get logprobs. By default 1."""

ENTROPY = "entropy"
"""float32: the policy's entropy in nats, with gradient, for losses with `needs_entropy`."""

SCALE = "scale"
"""float32: factor of terms without an advantage: 1 over the advantages' divisor (`training.loss_mean`), 0
where nothing trains. By default the mask.
"""

START = "start_logprobs"
"""float32: the start policy's, for KL terms."""

SAMPLER = "sampler_logprobs"
"""float32: the sampler's, for datums with other `logprobs`."""

COVARIANT = "covariant"
"""1 for tokens of `train.token_advantages.covariant_tokens`, else 0."""

CANDIDATES, TEACHER = "candidates", "teacher_logprobs"
"""int64 and float32 [T, K]: a teacher's K most probable tokens at each position, and their logprobs. They add
`divergence_of_candidates` times `SCALE`.
"""

CANDIDATE_LOGPROBS = "candidate_logprobs"
"""float32 [T, K]: the model's logprobs of `CANDIDATES`, with gradient."""

CHOSEN_EXPERTS = "experts"
"""Not for losses. int64 [T, n]: the bytes of the experts to choose (`Routing.packed`), 8 in a number."""

OPTIONAL_INPUTS = frozenset(
    {MASK, TEMPERATURES, SCALE, START, SAMPLER, COVARIANT, CHOSEN_EXPERTS, CANDIDATES, TEACHER}
)

SKIPPED_STEPS = "skipped_steps"

POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
CLIP: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

SEQUENCE_CLIP: Mapping[str, float] = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
"""Bounds of a sequence's ratio (GSPO's authors)."""

# Added to divisors, as in verl.
TINY = 1e-8

# Limit of log ratios, as in verl: exp(89) is infinite in float32, and times a zero gradient NaN.
MAX_LOG_RATIO = 20.0


TERMS: Mapping[str, float] = {**dict.fromkeys(KL_LOSSES, 0.0), "entropy": 0.0, "off_policy_mask": 0.0}
"""Settings of every policy loss (docs/training.md#losses); 0: off."""


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    name: str
    tokens: TokenLosses
    settings: Mapping[str, float]
    needs_entropy: bool = False

    def __call__(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Refuses a reduced loss, because microbatches would not add up."""
        inputs = {SCALE: inputs[MASK].to(logprobs.dtype), **inputs}
        losses = self.tokens(logprobs, inputs, self.settings)
        if losses.shape != logprobs.shape:
            raise EngineError(
                f"loss_fn {self.name!r} returned a tensor of shape {list(losses.shape)} for logprobs of "
                f"shape {list(logprobs.shape)}; return the loss of each token, unreduced"
            )
        return _with_terms(losses, logprobs, inputs, self.settings)


@dataclass(frozen=True, slots=True)
class Loss:
    tokens: TokenLosses
    inputs: frozenset[str] = POLICY_INPUTS
    """The `loss_fn_inputs` [T] that a datum must have, besides `OPTIONAL_INPUTS`."""

    settings: Mapping[str, float] = field(default_factory=dict[str, float])

    ratio: Literal["token", "sequence"] = "token"

    needs_entropy: bool = False

    @property
    def known(self) -> Mapping[str, float]:
        return {**(TERMS if self.inputs >= POLICY_INPUTS else {}), **self.settings}

    def configured(self, name: str, config: Mapping[str, float | str] | None) -> ConfiguredLoss:
        known = self.known
        settings = _Settings(name, {**known, **_numbers(name, config or {}, known=known)})
        needs_entropy = self.needs_entropy or bool(settings.get("entropy"))
        return ConfiguredLoss(name, self.tokens, settings, needs_entropy)


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
    del settings
    return -logprobs * inputs["weights"]


def importance_sampling(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]
) -> Tensor:
    del settings
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Schulman et al. 2017."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """MiniMax-M1, 2025."""
    clipped = _clip(_ratio(logprobs, inputs), settings)
    return -clipped.detach() * inputs["advantages"] * logprobs


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """GSPO-token of Zheng et al. 2025, arXiv:2507.18071, divided by the sequence's number of trained tokens.

    A token's ratio has the value of its sequence's ratio and its own gradient, so tokens can have different
    advantages.
    """
    advantages = inputs["advantages"]
    means, counts = _sequence_means(logprobs.detach() - inputs["logprobs"], inputs)
    ratio = _exp(means + logprobs - logprobs.detach())
    bounded = torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)
    return -bounded / counts


def ppo_dual_clip(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Ye et al. 2020, arXiv:1912.09729."""
    losses, advantages = ppo(logprobs, inputs, settings), inputs["advantages"]
    return torch.where(advantages < 0, torch.minimum(losses, -settings["dual_clip"] * advantages), losses)


def dppo_tv(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Qi et al. 2026, arXiv:2602.04879, Binary-TV."""
    moved = logprobs.detach().exp() - inputs["logprobs"].exp()
    return _within(moved.abs(), moved, logprobs, inputs, settings)


def dppo_kl(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Qi et al. 2026, Binary-KL, of the token's Bernoulli distributions."""
    new, old = logprobs.detach().exp(), inputs["logprobs"].exp()
    others = ((1 - old + TINY) / (1 - new + TINY)).log()
    divergence = old * (inputs["logprobs"] - logprobs.detach()) + (1 - old) * others
    return _within(divergence, new - old, logprobs, inputs, settings)


def _within(
    divergence: Tensor,
    moved: Tensor,
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, float],
) -> Tensor:
    advantages = inputs["advantages"]
    up = (advantages > 0) & (moved > 0) & (divergence > settings["delta_high"])
    down = (advantages < 0) & (moved < 0) & (divergence > settings["delta_low"])
    return torch.where(up | down, 0.0, importance_sampling(logprobs, inputs, settings))


def sapo(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """A soft clip; Gao et al. 2025, arXiv:2511.20347."""
    advantages = inputs["advantages"]
    tau = torch.where(advantages > 0, settings["tau_pos"], settings["tau_neg"])
    return -4 / tau * torch.sigmoid(tau * (_ratio(logprobs, inputs) - 1)) * advantages


def clip_cov(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Cui et al. 2025, arXiv:2505.22617."""
    return torch.where(inputs[COVARIANT] > 0, 0.0, ppo(logprobs, inputs, settings))


def kl_cov(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Cui et al. 2025, arXiv:2505.22617."""
    moved = torch.where(inputs[COVARIANT] > 0, logprobs - inputs["logprobs"], 0.0).abs()
    return importance_sampling(logprobs, inputs, settings) + settings["kl"] * moved * inputs[SCALE]


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """Richemond et al. 2024, arXiv:2405.19107. Meant for soft advantages: r - beta * log E exp(r / beta)."""
    gaps = torch.where(inputs[MASK], logprobs - inputs["logprobs"], 0.0)
    return settings["beta"] / 2 * gaps.square() * inputs[SCALE] - logprobs * inputs["advantages"]


def _with_terms(
    losses: Tensor, logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]
) -> Tensor:
    if limit := settings.get("off_policy_mask"):
        sampler = inputs.get(SAMPLER, inputs["logprobs"])
        apart, _ = _sequence_means(sampler - logprobs.detach(), inputs)
        losses = torch.where((inputs["advantages"] < 0) & (apart > limit), 0.0, losses)
    chosen = [name for name in KL_LOSSES if settings.get(name)]
    if chosen and START not in inputs:
        raise EngineError(f"loss_fn_config.{chosen[0]} needs the loss_fn_input {START}")
    for name in chosen:
        losses = losses + settings[name] * inputs[SCALE] * _divergence(name, logprobs, inputs)
    if weight := settings.get("entropy"):
        losses = losses - weight * inputs[SCALE] * inputs[ENTROPY]
    if TEACHER in inputs:
        apart = divergence_of_candidates(inputs[CANDIDATE_LOGPROBS], inputs[TEACHER])
        losses = losses + inputs[SCALE] * torch.where(inputs[MASK], apart, 0.0)
    return losses


def divergence_of_candidates(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy, teacher) in nats (T,), from logprobs (T, K) of the same tokens; the rest is one token."""
    rests = [(1 - each.exp().sum(-1, keepdim=True)).clamp(min=TINY).log() for each in (policy, teacher)]
    p, t = (torch.cat([each, rest], -1) for each, rest in zip((policy, teacher), rests, strict=True))
    return (p.exp() * (p - t)).sum(-1)


def _divergence(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    apart = torch.where(inputs[MASK], logprobs - inputs[START], 0.0)
    if name == "kl_k1":
        return apart
    if name == "kl_k2":
        return apart.square() / 2
    k3 = _exp(-apart) - 1 + apart
    return k3 * _ratio(logprobs, inputs) if name == "kl_unbiased" else k3


def _sequence_means(values: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return, per token, its sequence's mean of `values` over trained tokens, and their number."""
    sequence, mask = inputs[SEQUENCE], inputs[MASK]
    both = torch.stack([torch.where(mask, values, 0.0), mask.to(values.dtype)])
    totals, counts = values.new_zeros(2, int(sequence.max()) + 1).index_add(1, sequence, both)
    counts = counts.clamp(min=1)
    return (totals / counts)[sequence], counts[sequence]


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    # Positions that do not train may have any logprob; their ratio is 1.
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
    "ppo_dual_clip": Loss(ppo_dual_clip, settings={**CLIP, "dual_clip": 3.0}),
    "dppo_tv": Loss(dppo_tv, settings={"delta_low": 0.2, "delta_high": 0.2}),
    "dppo_kl": Loss(dppo_kl, settings={"delta_low": 0.05, "delta_high": 0.05}),
    "sapo": Loss(sapo, settings={"tau_pos": 1.0, "tau_neg": 1.05}),
    "clip_cov": Loss(
        clip_cov,
        inputs=POLICY_INPUTS | {COVARIANT},
        settings={**CLIP, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    ),
    "kl_cov": Loss(kl_cov, inputs=POLICY_INPUTS | {COVARIANT}, settings={"kl": 1.0, "cov_share": 2e-4}),
}
"""Tinker's names mean the same, but its `gspo` is not divided."""


def resolve_loss(name: str) -> Loss:
    """Look up a loss in the table, or import a user's as `module:name` or `file.py:name`.

    A user's loss is a `Loss`, or a function with `POLICY_INPUTS` and no settings. Because this imports code,
    look up names from a network in `LOSSES`.
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
    if taken := sorted(loss.settings.keys() & TERMS.keys()):
        raise EngineRequestError(
            f"loss_fn {name!r} declares the setting {taken[0]!r}, which every policy loss has already; "
            "rename it"
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
    entropy_gradients: bool = False,
    top: int = 0,
) -> Tensor:
    """Return logprobs (S,) of targets (S,), float32 or wider, each given the token at its place.

    The computation runs inside a call of `model`, as FSDP requires of its root module.

    Args:
        inputs: For the model's forward pass, B rows of N tokens.
        places: [S] among the B * N tokens; several targets may follow one token.
        temperatures: [S], divide the logits.
        rows: Tokens with logits in memory at once.
        with_entropies: Return (2, S), with entropies in nats.
        top: Return (1 + 2 K, S), with the K highest logprobs and their ids.
    """
    of_chunk: Any = _with_entropies if with_entropies else _TargetLogprobs.apply
    if entropy_gradients:
        of_chunk = _LogprobsAndEntropies.apply
    if top:
        of_chunk = partial(_with_top, top)
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
    """`of_chunk`: logits (n, V), temperatures (n,), places (s,) in [0, n), targets (s,) -> (s,) or (k, s)."""
    output = backbone_output(model, **inputs)
    hidden = output.last_hidden_state.flatten(0, 1)  # (B * N, C)
    device = hidden.device
    scale = None
    if temperatures is not None:
        # Sequences can share a token at different temperatures.
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
    """Backward allocates one tensor like the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperatures: Tensor | None, places: Tensor, targets: Tensor
    ) -> Tensor:
        """See `_forward`. Returns (s,), float32 or wider."""
        wide = _scaled(logits, temperatures)
        normalizers = wide.logsumexp(-1)  # Once per token, which sequences may share.
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


# A chunk's entropies then take little memory next to its logits.
BLOCKS = 8


class _LogprobsAndEntropies(torch.autograd.Function):
    """`_TargetLogprobs` with entropies: (2, s)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperatures: Tensor | None, places: Tensor, targets: Tensor
    ) -> Tensor:
        wide = _scaled(logits, temperatures)
        normalizers = wide.logsumexp(-1)
        entropies = _entropies(wide, normalizers)
        ctx.save_for_backward(logits, temperatures, normalizers, entropies, places, targets)
        return torch.stack([wide[places, targets] - normalizers[places], entropies[places]])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, temperatures, normalizers, entropies, places, targets = ctx.saved_tensors
        both = torch.zeros(2, len(normalizers), dtype=normalizers.dtype, device=normalizers.device)
        both = both.index_add_(1, places, gradient)[..., None]
        result = logits.to(normalizers.dtype, copy=True)
        if temperatures is not None:
            result.div_(temperatures[:, None])
        result.sub_(normalizers[:, None])
        parts = (each.chunk(BLOCKS) for each in (result, entropies[:, None], *both))
        for part, entropy, of_logprobs, of_entropies in zip(*parts, strict=True):
            probabilities = part.exp()
            # d entropy / d logit = -p (log p + entropy); the clamp keeps log p finite.
            part.clamp_(min=-1e4).add_(entropy).mul_(-of_entropies).sub_(of_logprobs).mul_(probabilities)
        result.index_put_((places, targets), gradient[0], accumulate=True)
        if temperatures is not None:
            result.div_(temperatures[:, None])
        return result.to(logits.dtype), None, None, None


def _with_entropies(logits: Tensor, temperatures: Tensor | None, places: Tensor, targets: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        logprobs: Any = _TargetLogprobs.apply(logits, temperatures, places, targets)
        with torch.no_grad():  # Last, so that `checkpoint` need not recompute it.
            wide = _scaled(logits, temperatures)
            entropies = _entropies(wide, wide.logsumexp(-1))[places]
        return torch.stack([logprobs, entropies])
    wide = _scaled(logits, temperatures)
    normalizers = wide.logsumexp(-1)
    logprobs = wide[places, targets] - normalizers[places]
    return torch.stack([logprobs, _entropies(wide, normalizers)[places]])


def _with_top(
    top: int, logits: Tensor, temperatures: Tensor | None, places: Tensor, targets: Tensor
) -> Tensor:
    wide = _scaled(logits, temperatures)
    normalizers = wide.logsumexp(-1)
    found = wide.topk(top)
    values = (found.values - normalizers[:, None])[places].T
    # float32 holds ids up to 2^24.
    own = (wide[places, targets] - normalizers[places])[None]
    return torch.cat([own, values, found.indices[places].T.to(own.dtype)])


def _entropies(logits: Tensor, normalizers: Tensor) -> Tensor:
    """In nats (n,), from logits (n, V) and `logsumexp` (n,)."""
    parts = zip(logits.chunk(BLOCKS), normalizers.chunk(BLOCKS), strict=True)
    return torch.cat([torch.special.entr((p - n[:, None]).exp_()).sum(-1) for p, n in parts])


def _scaled(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return wide if temperatures is None else wide / temperatures[:, None]
