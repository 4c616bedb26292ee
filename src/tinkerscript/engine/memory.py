"""`peak_memory`: what training and sampling hold at their peaks, by a formula. `bench/memory.py` measures it.

Nothing here computes with a model: its modules are made on torch's `meta` device, to count them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tinkerscript.engine.decoder import FUSED_MODEL_TYPES
from tinkerscript.engine.lora import linear_shape, target_modules
from tinkerscript.engine.running_batch import PREFILL_TOKENS, PROMPT_CACHE_TOKENS
from tinkerscript.engine.weights import LoraSettings


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device."""

    weights: int
    """The model, the samplers' rotary tables and, where all weights train, their copies of the weights."""

    adapters: int
    """What trains of a LoRA, and the samplers' copies."""

    moments: int
    """AdamW's two per trained parameter."""

    gradients: int
    """Of a step: they add up over its microbatches."""

    activations: int
    """Of a microbatch at its peak, or what the optimizer's step makes, if that is more."""

    logits: int
    """One chunk, and what the loss makes of it; 0 if the peak is elsewhere."""

    kv_cache: int
    """Keys and values of running rows and of kept prompts."""

    decoding: int
    """What a prefill makes, or a step of all rows, whichever is more."""

    @property
    def training(self) -> int:
        """The peak while a microbatch trains, if nothing is sampled."""
        held = self.weights + self.adapters + self.moments + self.gradients
        return held + self.activations + self.logits

    @property
    def sampling(self) -> int:
        """The peak while rows decode, if nothing trains."""
        return self.weights + self.adapters + self.kv_cache + self.decoding

    @property
    def total(self) -> int:
        """The peak of an engine that does both in turns."""
        made = self.activations + self.logits
        return self.training - made + self.kv_cache + max(made, self.decoding)


@dataclass(frozen=True, slots=True)
class Workload:
    """What an engine is asked for."""

    tokens: int
    """Of a microbatch, with padding. A longer row is a microbatch by itself."""

    logits_rows: int
    """Tokens whose logits are held at once (`decoder.logits_rows`)."""

    activation_checkpointing: bool = False

    samplers: int = 0
    """Policy versions that can be sampled from."""

    rows: int = 0
    """Sequences that decode together."""

    prompt: int = 0
    """Tokens of a prompt."""

    length: int = 0
    """Tokens of a prompt and its reply."""


def peak_memory(
    config: PreTrainedConfig, lora: LoraSettings | None, dtype: torch.dtype, work: Workload
) -> Memory:
    """The peak memory of the embedded engine on one device: of a training microbatch, and of sampling.

    `lora` is None if all weights train: they are then float32, and `dtype` is that of their products.

    With e the bytes of `dtype`; C, I and V the widths of hidden states, MLP and vocabulary; Q and K the
    channels of queries and keys; H heads; L layers; T `tokens`; R those of one chunk of logits, all of which
    have one size; and "half" for bfloat16:

    - weights: e per parameter with LoRA, else 4, and e for each sampler, whose head is never tied. Rotary
      tables: 2 e per position and channel of a head.
    - adapters: 4 per parameter, and for each sampler what its products take: A, and B beside zeros where
      projections are fused.
    - gradients: 4 per trained parameter. moments: 8.
    - activations of a layer, per token: inputs of norms, 4 (2 C + Q + K), without Q + K where heads are not
      normalized, and twice that if they train (in half 16 C + 6 (Q + K)); attention, e (2 Q + 2 K) + 4 H;
      MLP, 3 e I; inputs of products that train, 4 (2 C + I), in half 10 C + 2 I, but with adapters in half 4
      for each channel that each of them reads, since PEFT converts it for each; 4 for each rank of each.
    - activations: T L times that. With checkpointing T L e C, and T times that of one layer, whose backward
      pass makes 8 T I more, in half 10 T I. For the head 10 T C. If all weights train in half, their copies,
      2 per parameter; with checkpointing, of the head alone.
    - logits: 8 R V; with an adapter on the head 12 R V, in half 10 R V. A head that trains adds its
      gradient, 4 V C, which tied embeddings hold through the backward pass.
    - the optimizer's step: 4 per trained parameter.
    - kv_cache: 2 e K L per position, e V per row. Storage doubles when rows or lengths outgrow it; besides,
      `PROMPT_CACHE_TOKENS` are kept.
    - decoding: per token of a prefill (`PREFILL_TOKENS`, or a longer prompt), 2 e C + 2 e K L, with adapters
      4 C more, and the larger of e (7 Q + 9 K) and 3 e (Q + K) + 4 e I (with adapters, 2 e I + 16 I); or, per
      row of a step, 16 V, in half 18 V.

    These are the Llama family's. For other models, activations and decoding are estimates. The masks of short
    rows with branches (`packing.MASKED_TOKENS`) are left out. Raises EngineRequestError for targets that the
    model lacks.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    widths = _widths(model)
    adapters = _Adapters.of(model, lora, widths) if lora else None
    parameters = sum(each.numel() for each in model.parameters())
    trained = adapters.parameters if adapters else parameters
    e, fused = dtype.itemsize, config.model_type in FUSED_MODEL_TYPES
    tables = 2 * e * config.max_position_embeddings * widths.D if fused else 0
    copies = work.samplers * e * (parameters + (widths.V * widths.C if widths.tied and fused else 0))
    sampled = adapters.fused if adapters and fused else trained
    activations, logits = _microbatch(widths, adapters, parameters, e, work)
    return Memory(
        weights=tables + (parameters * e if adapters else parameters * 4 + copies),
        adapters=4 * (trained + work.samplers * sampled) if adapters else 0,
        moments=8 * trained,
        gradients=4 * trained,
        activations=activations,
        logits=logits,
        kv_cache=_kv_cache(widths, e, work) if work.rows else 0,
        decoding=_decoding(widths, adapters, e, work) if work.rows else 0,
    )


def frozen_memory(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a frozen model beside the one that trains: its weights once, for sampling and scoring, and its
    rotary tables. What it makes of a microbatch is less than what training makes."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    fused = config.model_type in FUSED_MODEL_TYPES
    tables = 2 * _widths(model).D * config.max_position_embeddings if fused else 0
    return dtype.itemsize * (sum(each.numel() for each in model.parameters()) + tables)


@dataclass(frozen=True, slots=True)
class _Widths:
    """The letters of the formula."""

    C: int
    I: int  # noqa: E741 - as in the formula
    V: int
    Q: int
    K: int
    H: int
    L: int
    D: int
    """Channels of a head."""

    normalized: int
    """Q + K where heads are normalized, else 0."""

    tied: bool


def _widths(model: Any) -> _Widths:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    queries = heads * head_dim
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    normalizes = any(name.endswith("q_norm") for name, _ in model.named_modules())
    return _Widths(
        C=config.hidden_size,
        I=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        V=config.vocab_size,
        Q=queries,
        K=keys,
        H=heads,
        L=config.num_hidden_layers,
        D=head_dim,
        normalized=queries + keys if normalizes else 0,
        tied=bool(config.tie_word_embeddings),
    )


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The adapters of one run: of all layers, and of the head."""

    parameters: int
    fused: int
    """Parameters as a sampler's fused products take them."""

    ranks: int
    """Of all adapters of layers."""

    reads: int
    """Channels that the adapters of layers read, each by itself."""

    inputs: int
    """The same, those that several adapters read counted once, without what attention holds anyway."""

    head: bool

    @classmethod
    def of(cls, model: Any, lora: LoraSettings, widths: _Widths) -> _Adapters:
        side_by_side: dict[str, int] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), widths.Q + 2 * widths.K)
        side_by_side |= dict.fromkeys(("gate_proj", "up_proj"), 2 * widths.I)
        head = model.get_output_embeddings()
        parameters = fused = ranks = reads = 0
        inputs: dict[tuple[str, int], int] = {}
        names = target_modules(model, lora.targets)
        for name in names:
            module = model.get_submodule(name)
            out, channels = linear_shape(module)
            parent, _, last = name.rpartition(".")
            parameters += lora.rank * (channels + out)
            fused += lora.rank * (channels + side_by_side.get(last, out))
            if module is not head:
                ranks += lora.rank
                reads += channels
                if last != "o_proj":
                    inputs[parent, channels] = channels
        has_head = any(model.get_submodule(name) is head for name in names)
        return cls(parameters, fused, ranks, reads, sum(inputs.values()), has_head)


def _microbatch(
    w: _Widths, adapters: _Adapters | None, parameters: int, e: int, work: Workload
) -> tuple[int, int]:
    """Bytes of activations and of logits where their sum is largest: at the head, in a layer, in the step."""
    half, tokens = e < 4, work.tokens
    layers = _layers(w, adapters, half=half) * tokens
    backward = (10 if half else 8) * w.I * tokens
    kept = tokens * w.L * w.C * (4 if adapters is None else e) if work.activation_checkpointing else layers
    copies = (
        2 * (w.V * w.C if work.activation_checkpointing else parameters) if half and adapters is None else 0
    )
    chunks = -(-tokens // work.logits_rows)
    chunk = -(-tokens // chunks) * w.V
    logits = (8 if not adapters or not adapters.head else 10 if half else 12) * chunk
    gradient = 0 if adapters else 4 * w.V * w.C
    if adapters is None and chunks > 1:  # A chunk's gradient is made beside that of the others.
        logits = max(logits, gradient + (e if half else 4) * chunk)
    one = layers // w.L if work.activation_checkpointing else 0
    places = [
        (kept + copies + 10 * w.C * tokens, logits + gradient),
        (kept + copies + one + backward + (gradient if w.tied else 0), 0),
        (4 * (adapters.parameters if adapters else parameters), 0),
    ]
    return max(places, key=sum)


def _layers(w: _Widths, adapters: _Adapters | None, *, half: bool) -> int:
    """Bytes that all layers hold for the backward pass, per token."""
    e = 2 if half else 4
    norms = 4 * (2 * w.C + w.normalized)
    if adapters is None:
        norms = 16 * w.C + 6 * w.normalized if half else 2 * norms
    attention = e * (2 * w.Q + 2 * w.K) + 4 * w.H
    per_layer = norms + attention + 3 * e * w.I
    if adapters is None:
        return w.L * (per_layer + (10 * w.C + 2 * w.I if half else 4 * (2 * w.C + w.I)))
    return w.L * per_layer + 4 * (adapters.reads if half else adapters.inputs) + 4 * adapters.ranks


def _kv_cache(w: _Widths, e: int, work: Workload) -> int:
    rows = length = 1
    while rows < work.rows:
        rows *= 2
    length = max(work.prompt, 1)
    while length < work.length:
        length *= 2
    return 2 * e * w.K * w.L * (rows * length + PROMPT_CACHE_TOKENS) + e * w.V * work.rows


def _decoding(w: _Widths, adapters: _Adapters | None, e: int, work: Workload) -> int:
    attention = e * (7 * w.Q + 9 * w.K)
    mlp = 3 * e * (w.Q + w.K) + (4 * e if adapters is None else 2 * e + 16) * w.I
    per_token = 2 * e * w.C + max(attention, mlp) + 2 * e * w.K * w.L + (4 * w.C if adapters else 0)
    step = work.rows * w.V * (18 if e < 4 else 16)
    return max(per_token * max(PREFILL_TOKENS, work.prompt), step)
