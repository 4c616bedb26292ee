"""`peak_memory`: a formula for the peak memory of training and sampling, checked by `bench/memory.py`.

It estimates activations and decoding outside the Llama family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tinkerscript.engine.decoder import FusedDecoder, HubDecoder, can_be_fused, logits_rows
from tinkerscript.engine.kv_cache import stored_tokens
from tinkerscript.engine.quantization import BITS, Quantization, linear_modules
from tinkerscript.engine.running_batch import PREFILL_TOKENS
from tinkerscript.engine.training import tokens_of_microbatch
from tinkerscript.engine.weights import LoraSettings


@dataclass(frozen=True, slots=True)
class Memory:
    weights: int
    """The model, rotary tables and, if all weights train, the samplers' copies."""

    adapters: int
    moments: int
    gradients: int
    activations: int
    """Peak of a microbatch, or of the optimizer step if larger."""

    logits: int
    """One chunk and the loss's tensors for it. 0 if the peak is elsewhere."""

    kv_cache: int

    decoding: int
    """The larger temporaries: of a prefill, or of a step of all rows."""

    @property
    def held(self) -> int:
        return self.weights + self.adapters + self.moments + self.gradients

    @property
    def checkpoint(self) -> int:
        """Bytes on disk."""
        return self.gradients + self.moments

    @property
    def training(self) -> int:
        return self.held + self.activations + self.logits

    @property
    def sampling(self) -> int:
        return self.weights + self.adapters + self.kv_cache + self.decoding

    @property
    def total(self) -> int:
        return self.held + self.kv_cache + max(self.activations + self.logits, self.decoding)


@dataclass(frozen=True, slots=True)
class Workload:
    tokens: int
    logits_rows: int
    """Tokens with logits in memory at once (`decoder.logits_rows`)."""

    activation_checkpointing: bool = False
    samplers: int = 0
    """Policy versions that can be sampled from."""

    rows: int = 0
    prompt: int = 0
    length: int = 0

    choices: int = 0
    """Bytes per token of recorded experts."""

    quantization: Quantization = "none"
    """For models that are not loaded yet."""


def peak_memory(
    config: PreTrainedConfig, lora: LoraSettings | None, dtype: torch.dtype, work: Workload
) -> Memory:
    """Peak memory on one device. If `lora` is None, all weights train in float32, with products in `dtype`.

    Leaves out the masks of short rows with branches.
    """
    return _peak(_empty(config), lora, dtype, work)


def _peak(model: Any, lora: LoraSettings | None, dtype: torch.dtype, work: Workload) -> Memory:
    w = _Widths.of(model)
    parameters = w.parameters
    quantized = (
        0
        if work.quantization == "none"
        else sum(model.get_submodule(path).weight.numel() for path in linear_modules(model))
    )
    trained, head = _adapters(model, lora) if lora else (parameters, True)
    e = dtype.itemsize
    # A sampler copies trained weights, and never ties its head.
    copies = work.samplers * e * (parameters + (w.V * w.C if w.tied and w.fused else 0))
    activations, logits = _microbatch(w, lora, e, work, trained=trained, head=head)
    return Memory(
        weights=w.tables(e)
        + ((parameters - quantized) * e if lora else parameters * 4 + copies)
        + round(quantized * BITS.get(work.quantization, 0) / 8),
        adapters=4 * trained * (1 + work.samplers) if lora else 0,
        moments=8 * trained,
        gradients=4 * trained,
        activations=activations,
        logits=logits,
        kv_cache=_kv_cache(w, e, work) if work.rows else 0,
        decoding=_decoding(w, lora, e, work) if work.rows else 0,
    )


def _adapters(model: Any, lora: LoraSettings) -> tuple[int, bool]:
    """Return the adapter's number of parameters, and whether it covers the head."""
    # PEFT takes half a second to import.
    from tinkerscript.engine.lora import expert_weights, linear_shape, target_modules

    names = target_modules(model, lora.targets)
    shapes = [linear_shape(model.get_submodule(name)) for name in names]
    shapes += [
        (len(weight) * weight.shape[1], len(weight) * weight.shape[2])
        for _, weight in expert_weights(model, lora.targets)
    ]
    head = any(model.get_submodule(name) is model.get_output_embeddings() for name in names)
    return sum(lora.rank * sum(shape) for shape in shapes), head


SHARE_OF_GPU = 0.9
"""The rest is for graphs, workspaces and fragments."""


def cache_bytes(model: PreTrainedModel, dtype: torch.dtype, lengths: Sequence[int], choices: int = 0) -> int:
    w = _Widths.of(model)
    return (w.token_bytes(dtype.itemsize) + choices) * stored_tokens(lengths, w.spread)


def cache_budget(
    model: PreTrainedModel,
    lora: LoraSettings | None,
    dtype: torch.dtype,
    *,
    max_rows: int,
    max_context: int,
    checkpointing: bool,
    choices: int = 0,
) -> int:
    """Bytes for keys and values, and for `choices` bytes per token, once `model` is loaded.

    Training gets at most three quarters, because few microbatches are full (docs/engine.md#memory).
    """
    w = _Widths.of(model)
    most = max_rows * max_context * (w.token_bytes(dtype.itemsize) + choices)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # Loading and proving left blocks that count as used.
    free = available_memory(str(model.device))
    if free is None:
        return most
    tokens, rows = tokens_of_microbatch(model.device), logits_rows(w.V, model.device)
    work = Workload(tokens, rows, checkpointing, samplers=2, rows=max_rows, prompt=PREFILL_TOKENS)
    memory = _peak(model, lora, dtype, work)
    loaded = sum(each.nbytes for each in model.parameters())
    left = max(free - (memory.total - memory.kv_cache - loaded), free // 4)
    if model.device.type == "cpu":
        return min(most, left, free // 2)
    return min(most, int(SHARE_OF_GPU * left))


def available_memory(device: str) -> int | None:
    """Free bytes, without swapping. None if unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    said = Path("/proc/meminfo")
    lines = said.read_text(encoding="ascii").splitlines() if said.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def frozen_memory(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    w = _Widths.of(_empty(config))
    return dtype.itemsize * w.parameters + w.tables(dtype.itemsize)


def _empty(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True, slots=True)
class _Widths:
    """C, I, V: widths of hidden states, MLP and vocabulary. Q, K: channels of queries and keys. H: heads. L:
    layers. D: channels per head.
    """

    C: int
    I: int  # noqa: E741 - as in the formula
    V: int
    Q: int
    K: int
    H: int
    L: int
    D: int
    positions: int
    kept: int
    normalized: int
    parameters: int
    tied: bool
    fused: bool

    @classmethod
    def of(cls, model: Any) -> _Widths:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        queries, keys = heads * head_dim, (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        normalizes = any(name.endswith("q_norm") for name, _ in model.named_modules())
        return cls(
            C=config.hidden_size,
            I=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            V=config.vocab_size,
            Q=queries,
            K=keys,
            H=heads,
            L=config.num_hidden_layers,
            D=head_dim,
            positions=getattr(config, "max_position_embeddings", 0),
            kept=_kept(config, heads) or 2 * keys,
            normalized=queries + keys if normalizes else 0,
            parameters=sum(each.numel() for each in model.parameters()),
            tied=bool(config.tie_word_embeddings),
            fused=can_be_fused(model),
        )

    @property
    def spread(self) -> float:
        return FusedDecoder.spread if self.fused else HubDecoder.spread

    def token_bytes(self, e: int) -> int:
        return e * self.kept * self.L

    def tables(self, e: int) -> int:
        return 2 * e * self.positions * self.D if self.fused else 0


def _kept(config: Any, heads: int) -> int:
    """Channels of latent attention's keys and values; otherwise 0."""
    widths = [getattr(config, f"{name}_head_dim", None) or 0 for name in ("qk_nope", "qk_rope", "v")]
    return heads * sum(widths) if widths[0] else 0


def _microbatch(
    w: _Widths, lora: LoraSettings | None, e: int, work: Workload, *, trained: int, head: bool
) -> tuple[int, int]:
    """(activations, logits) in bytes at their peak: at the head, in a layer, or in the step."""
    half, tokens = e < 4, work.tokens
    layer = _layer(w, lora, half=half) * tokens
    # Backward recomputes the MLP's products.
    backward = (10 if half else 8) * w.I * tokens
    kept = w.L * (tokens * w.C * (e if lora else 4) if work.activation_checkpointing else layer)
    # Autocast's copies in half precision, or with checkpointing only the head's.
    casts = 0 if lora or not half else 2 * (w.V * w.C if work.activation_checkpointing else w.parameters)
    chunks = -(-tokens // work.logits_rows)
    chunk = -(-tokens // chunks) * w.V
    logits = (8 if not lora or not head else 10 if half else 12) * chunk
    gradient = 0 if lora else 4 * w.V * w.C  # Tied embeddings hold the head's gradient during backward.
    if not lora and chunks > 1:  # A chunk's gradient next to the sum of the others.
        logits = max(logits, gradient + (e if half else 4) * chunk)
    places = [
        (kept + casts + 10 * w.C * tokens, logits + gradient),
        (kept + casts + work.activation_checkpointing * layer + backward + w.tied * gradient, 0),
        (4 * trained, 0),
    ]
    return max(places, key=sum)


def _layer(w: _Widths, lora: LoraSettings | None, *, half: bool) -> int:
    e = 2 if half else 4
    attention_and_mlp = e * (2 * w.Q + 2 * w.K) + 4 * w.H + 3 * e * w.I
    norms = 4 * (2 * w.C + w.normalized)
    if lora is not None:
        # In half precision, PEFT converts the input of each adapted product.
        inputs = 5 * w.C + w.Q + w.I if half else 2 * w.C + w.I
        return norms + attention_and_mlp + 4 * inputs + 4 * 7 * lora.rank
    norms = 16 * w.C + 6 * w.normalized if half else 2 * norms
    return norms + attention_and_mlp + (10 * w.C + 2 * w.I if half else 4 * (2 * w.C + w.I))


def _kv_cache(w: _Widths, e: int, work: Workload) -> int:
    return (w.token_bytes(e) + work.choices) * stored_tokens([work.length] * work.rows, w.spread)


def _decoding(w: _Widths, lora: LoraSettings | None, e: int, work: Workload) -> int:
    attention = e * (7 * w.Q + 9 * w.K)
    mlp = 3 * e * (w.Q + w.K) + (2 * e + 8 if lora else 4 * e) * w.I
    per_token = 2 * e * w.C + max(attention, mlp) + w.token_bytes(e) + (4 * w.C if lora else 0)
    prefilled = min(PREFILL_TOKENS, work.rows * work.prompt)
    # The next chunk's state is made from the previous one's.
    long = 2 * w.token_bytes(e) * work.prompt if work.prompt > PREFILL_TOKENS else 0
    return max(per_token * prefilled + long, work.rows * w.V * (18 if e < 4 else 16))
