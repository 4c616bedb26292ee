"""`Decoder`: a frozen copy of the weights that prefills prompts and decodes one token per row and step.

`FusedDecoder` is written for the Llama family (Llama, Mistral, Qwen2, Qwen3); `HubDecoder` drives any other
Hugging Face causal model through its own forward pass. Both keep keys and values in a `KVCache`: tensors are
(rows, kv_heads, length, head_dim) per layer, and live rows are [0, n), so that a step reads views and never
gathers.

Invariants: a decoder gives the model's own logits, which `decoder_for` proves on random tokens before a kind
of decoder is used. Attention never reaches beyond a row's own length.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from tinkerscript.errors import EngineError

FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


PROOF_TOLERANCE = 2e-3
"""Largest difference from the model's own log probabilities, in float32, that a decoder may have."""


PROOF_TOLERANCE_OF_HALF = 0.25
"""The same in bfloat16. Its rounding makes some hundredths, a wrong computation several nats."""


NO_ADAPTER = "none"
"""A name that no adapter has: a LoRA layer for which it is active computes what its base layer does."""


LOGITS_ENTRIES = 2**25
"""Most entries (tokens times vocabulary) of logits that are held at once: 128 MiB in float32."""


LOGITS_ENTRIES_OF_DEVICES = 2**27
"""The same on an accelerator, whose products want more rows."""


FORWARD_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What the forward pass of a model that cannot take our inputs raises."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """A LoRA adapter that no training changes: W x becomes W x + scale B A x."""

    scale: float
    modules: Mapping[str, tuple[Tensor, Tensor]]
    """Path of a linear module in the model -> A (rank, in) and B (out, rank), float32."""

    slot: str = ""
    """The adapter of the module tree that takes these tensors, for a decoder that computes with the tree."""


class Decoder(ABC):
    """Weights are frozen at construction. B rows, P prompt positions, V vocabulary."""

    device: torch.device
    """Where ids, lengths and logits live."""

    dtype: torch.dtype
    """The dtype of the copied weights, keys, values and logits."""

    @abstractmethod
    def with_adapter(self, adapter: AdapterTensors) -> Decoder:
        """A decoder of the same weights with `adapter` over them. The weights are shared, not copied."""

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """ids (B, P) right-padded, lengths (B,) -> logits after each prompt (B, V), keys, values.

        Keys and values are lists over layers of (B, kv_heads, P, head_dim).
        """

    @abstractmethod
    def score(self, ids: Tensor) -> Iterator[Tensor]:
        """ids (P,) -> logits (n, V) of consecutive positions, P in all, at most `logits_rows` at once."""

    @abstractmethod
    def step(self, ids: Tensor, lengths: Tensor, longest: int, cache: KVCache) -> Tensor:
        """ids (n,): the newest token of rows [0, n); lengths (n,): tokens before it -> logits (n, V).

        Writes position lengths[i] of row i and attends to positions <= lengths[i]. `longest` is max(lengths).
        """


class FusedDecoder(Decoder):
    """Llama-family decoder with fused projections: about a fifth of the module tree's operations.

    Each product is of an input (N, in) with a weight (in, out).
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype = torch.float32, *, shares: bool = False
    ) -> None:
        """`shares`: use the model's own weights, which must be frozen and of `dtype`.

        The projections that are fused become views of the fused weights, so that nothing is held twice.
        """
        self.device, self.dtype = model.device, dtype
        self._shares = shares
        self._lora: list[dict[str, _Factors]] = []
        config: Any = model.config
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        base: Any = model.model
        self._embedding = self._copy(base.embed_tokens.weight)
        self._final_norm = self._copy(base.norm.weight)
        head: Any = model.get_output_embeddings()
        self._head = self._transposed(head.weight)
        self._head_lora: _Factors | None = None
        self._layers = [self._fuse(layer) for layer in base.layers]
        self._cos, self._sin = self._rotary_tables(base, config.max_position_embeddings)

    def with_adapter(self, adapter: AdapterTensors) -> FusedDecoder:
        other = copy.copy(self)
        names = {
            "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
            "out": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }
        other._lora = [
            {
                kind: factors
                for kind, parts in names.items()
                if (
                    factors := _factors(
                        adapter, [f"model.layers.{index}.{part}" for part in parts], widths[kind]
                    )
                )
            }
            for index, widths in enumerate(self._widths)
        ]
        other._head_lora = _factors(adapter, ["lm_head"], [self._head.shape[1]])
        return other

    @property
    def _widths(self) -> list[dict[str, list[int]]]:
        """Per layer, the output widths of the projections that each weight fuses."""
        q, kv = self._heads * self._head_dim, self._kv_heads * self._head_dim
        return [
            {
                "qkv": [q, kv, kv],
                "out": [layer["out"].shape[1]],
                "gate_up": [layer["gate_up"].shape[1] // 2] * 2,
                "down": [layer["down"].shape[1]],
            }
            for layer in self._layers
        ]

    def _copy(self, weight: Tensor) -> Tensor:
        return weight.detach() if self._shares else weight.detach().to(self.dtype, copy=True)

    def _transposed(self, weight: Tensor) -> Tensor:
        return self._copy(weight).t() if self._shares else self._copy(weight).t().contiguous()

    def _fused(self, projections: Sequence[Any]) -> Tensor:
        """The weights of several projections side by side (in, out)."""
        weight = torch.cat([projection.weight.detach() for projection in projections])
        if self._shares:
            for projection, part in zip(
                projections, weight.split([len(p.weight) for p in projections]), strict=True
            ):
                projection.weight.data = part
        return self._transposed(weight)

    def _fuse(self, layer: Any) -> dict[str, Any]:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [p.bias for p in projections]
        has_norm = hasattr(attention, "q_norm")
        return {
            "norm_1": self._copy(layer.input_layernorm.weight),
            "norm_2": self._copy(layer.post_attention_layernorm.weight),
            "qkv": self._fused(projections),
            "qkv_bias": None if biases[0] is None else self._copy(torch.cat(biases)),
            # One weight row per head, so that q and k are normalized in one operation: (heads + kv_heads, D)
            "qk_norm": self._copy(
                torch.cat(
                    [
                        attention.q_norm.weight.expand(self._heads, -1),
                        attention.k_norm.weight.expand(self._kv_heads, -1),
                    ]
                )
            )
            if has_norm
            else None,
            "out": self._transposed(attention.o_proj.weight),
            "gate_up": self._fused((mlp.gate_proj, mlp.up_proj)),
            "down": self._transposed(mlp.down_proj.weight),
        }

    def _rotary_tables(self, base: Any, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin (positions, 1, D); sin carries rotate_half's sign, so that a roll does the rest."""
        ids = torch.arange(positions, device=self._embedding.device)[None]
        cos, sin = base.rotary_emb(self._embedding[:1, None], ids)
        half = self._head_dim // 2
        signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return cos[0, :, None].contiguous(), signed[:, None].contiguous()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _with_lora(self, output: Tensor, h: Tensor, index: int, kind: str) -> Tensor:
        """`output` of a product with h, and what the adapter adds to it."""
        return _plus(output, h, self._lora[index].get(kind)) if self._lora else output

    def _qkv(self, h: Tensor, index: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """h (N, C) -> rotated q and k (N, heads + kv_heads, D), v (N, kv_heads, D)."""
        layer = self._layers[index]
        flat = (
            h @ layer["qkv"] if layer["qkv_bias"] is None else torch.addmm(layer["qkv_bias"], h, layer["qkv"])
        )
        flat = self._with_lora(flat, h, index, "qkv")
        qkv = flat.view(len(h), self._heads + 2 * self._kv_heads, self._head_dim)
        qk, v = qkv.split([self._heads + self._kv_heads, self._kv_heads], dim=1)
        if layer["qk_norm"] is not None:
            qk = F.rms_norm(qk, (self._head_dim,), None, self._eps) * layer["qk_norm"]
        return torch.addcmul(qk * cos, qk.roll(self._head_dim // 2, -1), sin), v

    def _mlp(self, x: Tensor, index: int) -> Tensor:
        layer = self._layers[index]
        h = self._rms(x, layer["norm_2"])
        gate, up = self._with_lora(h @ layer["gate_up"], h, index, "gate_up").chunk(2, dim=-1)
        h = F.silu(gate) * up
        return self._with_lora(torch.addmm(x, h, layer["down"]), h, index, "down")

    def _logits(self, x: Tensor) -> Tensor:
        h = self._rms(x, self._final_norm)
        return _plus(h @ self._head, h, self._head_lora)

    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x, keys, values = self._hidden(ids)
        last = x[torch.arange(len(ids), device=ids.device), lengths - 1]
        return self._logits(last), keys, values

    def score(self, ids: Tensor) -> Iterator[Tensor]:
        hidden = self._hidden(ids[None], keep=False)[0][0]
        for part in hidden.split(logits_rows(self._head.shape[1], self.device)):
            yield self._logits(part)

    def _hidden(self, ids: Tensor, *, keep: bool = True) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """ids (B, P) -> hidden states (B, P, C), keys and values per layer (B, kv_heads, P, D) to `keep`."""
        B, P = ids.shape
        x = self._embedding[ids.reshape(-1)]  # (B*P, C)
        cos, sin = (table[:P].repeat(B, 1, 1) for table in (self._cos, self._sin))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            qk, v = self._qkv(self._rms(x, layer["norm_1"]), index, cos, sin)
            qk = qk.view(B, P, -1, self._head_dim).transpose(1, 2)  # (B, heads + kv_heads, P, D)
            v = v.reshape(B, P, self._kv_heads, self._head_dim).transpose(1, 2)
            q, k = qk.split([self._heads, self._kv_heads], dim=1)
            # Right padding: causal attention alone keeps real positions from seeing the padding.
            o = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self._heads != self._kv_heads
            )
            h = o.transpose(1, 2).reshape(B * P, -1)
            x = self._with_lora(torch.addmm(x, h, layer["out"]), h, index, "out")
            x = self._mlp(x, index)
            if keep:
                keys.append(k.contiguous())  # Not views, which would keep the queries too.
                values.append(v.contiguous())
        return x.view(B, P, -1), keys, values

    def step(self, ids: Tensor, lengths: Tensor, longest: int, cache: KVCache) -> Tensor:
        n = len(ids)
        x = self._embedding[ids]  # (n, C)
        cos, sin = self._cos[lengths], self._sin[lengths]
        rows = torch.arange(n, device=ids.device)
        mask = attention_mask(lengths, longest, self.dtype) if n > 1 else None
        for index, layer in enumerate(self._layers):
            qk, v = self._qkv(self._rms(x, layer["norm_1"]), index, cos, sin)
            q, k = qk.split([self._heads, self._kv_heads], dim=1)
            if n == 1:
                cache.keys[index][0, :, longest] = k[0]
                cache.values[index][0, :, longest] = v[0]
            else:
                cache.keys[index][rows, :, lengths] = k
                cache.values[index][rows, :, lengths] = v
            o = self._attend(
                q, cache.keys[index][:n, :, : longest + 1], cache.values[index][:n, :, : longest + 1], mask
            )
            x = self._with_lora(torch.addmm(x, o, layer["out"]), o, index, "out")
            x = self._mlp(x, index)
        return self._logits(x)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q (n, heads, D); keys, values (n, kv_heads, T, D); mask (n, 1, 1, T) -> (n, heads * D)."""
        n = len(q)
        grouped = q.view(n, self._kv_heads, -1, self._head_dim)
        o = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return o.reshape(n, -1)


_Factors = tuple[Tensor, Tensor]
"""What an adapter adds to a product of h (N, in): h @ (in, ranks) @ (ranks, out), float32."""


def _factors(adapter: AdapterTensors, names: Sequence[str], widths: Sequence[int]) -> _Factors | None:
    """Of the modules that one weight fuses, each `widths` wide; None if the adapter has none of them."""
    there = [(at, *adapter.modules[name]) for at, name in enumerate(names) if name in adapter.modules]
    if not there:
        return None
    down = torch.cat([a for _, a, _ in there]).t().contiguous()
    up = torch.zeros(down.shape[1], sum(widths), device=down.device)
    row = 0
    for at, a, b in there:
        column = sum(widths[:at])
        up[row : row + len(a), column : column + widths[at]] = b.t() * adapter.scale
        row += len(a)
    return down, up


def _plus(output: Tensor, h: Tensor, factors: _Factors | None) -> Tensor:
    if factors is None:
        return output
    return (output + h.float() @ factors[0] @ factors[1]).to(output.dtype)


class HubDecoder(Decoder):
    """Any causal model of the Hugging Face library, through its own forward pass and our `KVCache`."""

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype = torch.float32, *, shares: bool = False
    ) -> None:
        """`shares`: use the model itself, which must be frozen and of `dtype`."""
        self.device, self.dtype = model.device, dtype
        self._apply: Callable[[], None] = lambda: None
        if shares:
            self._model = model
            return
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        # Buffers keep their dtype, so rotary frequencies stay exact, as when a model is loaded in `dtype`.
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)

    def with_adapter(self, adapter: AdapterTensors) -> HubDecoder:
        other = copy.copy(self)
        other._apply = partial(_put_into_tree, self._model, adapter)
        return other

    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        self._apply()
        cache = DynamicCache()
        output = backbone_output(self._model, input_ids=ids, past_key_values=cache, use_cache=True)
        last = output.last_hidden_state[torch.arange(len(ids), device=ids.device), lengths - 1]
        logits = head_logits(self._model, output, last[:, None])[:, 0]
        layers: list[Any] = list(cache.layers)
        return logits, [layer.keys for layer in layers], [layer.values for layer in layers]

    def score(self, ids: Tensor) -> Iterator[Tensor]:
        self._apply()
        output = backbone_output(self._model, input_ids=ids[None], use_cache=False)
        rows = logits_rows(int(self._model.config.vocab_size), self.device)
        for part in output.last_hidden_state.split(rows, dim=1):
            yield head_logits(self._model, output, part)[0]

    def step(self, ids: Tensor, lengths: Tensor, longest: int, cache: KVCache) -> Tensor:
        self._apply()
        mask = attention_mask(lengths, longest, self.dtype)
        output: Any = self._model(
            input_ids=ids[:, None],
            position_ids=lengths[:, None],
            attention_mask=mask,
            past_key_values=_SlotCache(cache, lengths, longest),
            use_cache=True,
        )
        return output.logits[:, -1]


def _put_into_tree(model: PreTrainedModel, adapter: AdapterTensors) -> None:
    """Make the module tree compute with `adapter`, and with no other."""
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        layer: Any = module
        layer.set_adapter(adapter.slot if name in adapter.modules else NO_ADAPTER)
        if name in adapter.modules:
            a, b = adapter.modules[name]
            layer.lora_A[adapter.slot].weight.data = a
            layer.lora_B[adapter.slot].weight.data = b
            layer.scaling[adapter.slot] = adapter.scale


class _SlotLayer(CacheLayerMixin):
    """One layer of `KVCache` for one step: writes position lengths[i] of row i, returns [0, longest]."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, longest: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._lengths, self._longest = lengths, longest
        self._rows = torch.arange(len(lengths), device=keys.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """States (n, kv_heads, 1, D) -> all keys and values (n, kv_heads, longest + 1, D)."""
        assert self.keys is not None
        assert self.values is not None
        n, end = len(self._rows), self._longest + 1
        self.keys[self._rows, :, self._lengths] = key_states[:, :, 0]
        self.values[self._rows, :, self._lengths] = value_states[:, :, 0]
        return self.keys[:n, :, :end], self.values[:n, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._longest + query_length, 0

    def get_seq_length(self) -> int:
        return self._longest

    def get_max_cache_shape(self) -> int:
        return -1


class _SlotCache(Cache):
    """A Hugging Face cache over the rows of a `KVCache`, for one decoding step."""

    def __init__(self, cache: KVCache, lengths: Tensor, longest: int) -> None:
        layers = [
            _SlotLayer(keys, values, lengths, longest)
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        super().__init__(layers=layers)  # pyright: ignore[reportArgumentType]


def backbone_output(model: PreTrainedModel, **inputs: Any) -> Any:
    """What the layers of `model` give its head for `inputs`: `last_hidden_state` (B, N, C) among others."""
    return model.get_decoder()(**inputs)


def head_logits(model: PreTrainedModel, output: Any, hidden: Tensor) -> Tensor:
    """Logits (B, n, V) of states (B, n, C), some of those in `output`.

    The model's own forward pass computes them, so scales and caps of its logits are kept.
    """
    part = type(output)(**{**output, "last_hidden_state": hidden})
    with redirected(model.get_decoder(), lambda *_, **__: part):
        result: Any = type(model).forward(model, use_cache=False)
    return result.logits


def logits_rows(vocabulary: int, device: torch.device) -> int:
    """How many tokens' logits are held at once."""
    return max(1, (LOGITS_ENTRIES if device.type == "cpu" else LOGITS_ENTRIES_OF_DEVICES) // vocabulary)


@contextmanager
def redirected(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """A context in which a call of `module` runs `forward`, between its hooks, such as those of FSDP."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def attention_mask(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (n, 1, 1, longest + 1): 0 at positions <= lengths[i], -inf beyond."""
    beyond = torch.arange(longest + 1, device=lengths.device) > lengths[:, None]
    return torch.zeros_like(beyond, dtype=dtype).masked_fill_(beyond, float("-inf"))[:, None, None]


def decoder_for(model: PreTrainedModel, *, frozen: bool) -> type[FusedDecoder | HubDecoder]:
    """The fastest kind of decoder whose logits match the model's own in float32.

    The proof of a `frozen` model needs no copy of its weights. Raises EngineError if no kind matches, naming
    the model type and the differences.
    """
    kinds = (FusedDecoder, HubDecoder) if model.config.model_type in FUSED_MODEL_TYPES else (HubDecoder,)
    tolerance = PROOF_TOLERANCE if model.dtype == torch.float32 else PROOF_TOLERANCE_OF_HALF
    found: dict[str, float | str] = {}
    for kind in kinds:
        try:
            gap = _proof_gap(model, kind(model, model.dtype, shares=frozen))
        except FORWARD_ERRORS as error:
            found[kind.__name__] = f"{type(error).__name__}: {error}"
            continue
        if gap <= tolerance:
            return kind
        found[kind.__name__] = gap
    raise EngineError(
        f"model type {model.config.model_type!r} cannot be decoded exactly: log probabilities differ from "
        f"the model's own by {found}; recurrent, ALiBi and encoder-decoder models are not supported"
    )


@torch.no_grad()
def _proof_gap(model: PreTrainedModel, decoder: Decoder) -> float:
    """Largest |difference| in log probability over two ragged rows: prefill and two steps of each."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.vocab_size)
    device = model.device
    ids = torch.randint(vocabulary, (2, 8), generator=generator).to(device)
    lengths = torch.tensor([6, 4], device=device)
    reference: Any = model(input_ids=ids, use_cache=False)
    expected = reference.logits.float().log_softmax(-1)
    rows = torch.arange(2, device=device)
    logits, keys, values = decoder.prefill(ids[:, :6], lengths)
    cache = KVCache()
    cache.reserve(2, 8, keys)
    for row in range(2):
        cache.put(row, [k[row] for k in keys], [v[row] for v in values])
    gap = (logits.float().log_softmax(-1) - expected[rows, lengths - 1]).abs().max()
    for _ in range(2):
        logits = decoder.step(ids[rows, lengths], lengths, int(lengths.max()), cache)
        gap = torch.maximum(gap, (logits.float().log_softmax(-1) - expected[rows, lengths]).abs().max())
        lengths = lengths + 1
    return float(gap)


class KVCache:
    """Storage that doubles when rows or lengths outgrow it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Rows that fit."""
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def length(self) -> int:
        """Positions that fit."""
        return self.keys[0].shape[2] if self.keys else 0

    def reserve(self, rows: int, length: int, like: list[Tensor]) -> None:
        """Make room for `rows` rows of `length` positions.

        `like`, per layer (..., kv_heads, positions, head_dim), gives heads, head size and dtype.
        """
        if self.keys and rows <= self.rows and length <= self.length:
            return
        new_rows = max(rows, 2 * self.rows if rows > self.rows else self.rows)
        new_length = max(length, 2 * self.length if length > self.length else self.length)
        for tensors in (self.keys, self.values):
            for index, each in enumerate(like):  # One layer after the other, so that one is held twice.
                heads, _, size = each.shape[-3:]
                new = torch.zeros(new_rows, heads, new_length, size, dtype=each.dtype, device=each.device)
                if index == len(tensors):
                    tensors.append(new)
                else:
                    new[: tensors[index].shape[0], :, : tensors[index].shape[2]] = tensors[index]
                    tensors[index] = new

    def put(self, row: int, keys: list[Tensor], values: list[Tensor]) -> None:
        """Write a prefilled prompt into a row: keys, values per layer (kv_heads, P, head_dim)."""
        length = keys[0].shape[1]
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.keys[layer][row, :, :length] = k
            self.values[layer][row, :, :length] = v

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]
