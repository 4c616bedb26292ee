"""`Decoder`: a frozen copy of the weights that prefills prompts and decodes one token per row and step.

Invariant: it gives the model's own logits, which `decoder_for` proves on random tokens.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from tinkerscript.engine.kv_cache import KVCache, LayerCache, LayerState, RowGroup, RowState, joined
from tinkerscript.engine.layer_kinds import SLIDING, LayerKinds, is_local, narrowed_windows
from tinkerscript.engine.products import product, sum_with_product
from tinkerscript.engine.quantization import is_quantized
from tinkerscript.engine.routing import Routing, redirected
from tinkerscript.engine.step_graphs import StepGraphs, cuda_graph
from tinkerscript.errors import EngineError

FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


PROOF_FACTOR, PROOF_FACTOR_OF_HALF = 30.0, 4.0
"""How far a decoder may exceed the model's rounding noise, in float32 and bfloat16. Correct decoders measured
0.1 to 3.5 and 0.1 to 1, a wrong attention scale 50,000 and 6.
"""


PROOF_FLOOR, PROOF_CEILING = 1e-6, 1.0
"""Nats: smaller differences of log probabilities always pass, larger ones never."""


NO_ADAPTER = "none"
"""With this unused name active, a LoRA layer computes its base layer."""


LOGITS_ENTRIES = 2**25
"""Tokens times vocabulary of logits in memory: 128 MiB in float32."""


LOGITS_ENTRIES_OF_DEVICES = 2**27
"""Accelerators prefer larger products."""


LayerT = TypeVar("LayerT", LayerState, LayerCache)

FORWARD_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """W x becomes W x + scale B A x."""

    scale: float
    modules: Mapping[str, tuple[Tensor, Tensor]]
    """Path of a linear module -> A (rank, in) and B (out, rank), float32."""

    slot: str = ""


class Decoder(ABC):
    """B rows, P prompt positions, V vocabulary."""

    device: torch.device
    dtype: torch.dtype
    spread: float
    """Rows share a step if their lengths differ by at most this factor."""

    routing: Routing | None = None
    """If given, the last layer of a row's state holds the experts of its tokens: `keys` (L, P, k)."""

    @abstractmethod
    def with_adapter(self, adapter: AdapterTensors) -> Decoder:
        """Return a decoder that shares this one's weights."""

    def forget(self) -> None:  # noqa: B027 (only what computes with the module tree has anything to forget)
        """Note that something else changed the model's adapters."""

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state. Such a model prefills a prompt whole and continues token by token."""
        return False

    @abstractmethod
    def prefill(
        self, ids: Tensor, lengths: Tensor, past: RowState | None = None, begin: int = 0
    ) -> tuple[Tensor, list[RowState]]:
        """ids (B, P) right-padded, lengths (B,) -> logits after each prompt (B, V), and the whole rows'
        states.

        With a `past` of `begin` tokens, all rows continue it (only one row if `is_recurrent`).
        """

    @abstractmethod
    def score(self, ids: Tensor) -> Iterator[Tensor]:
        """ids (P,) -> logits (n, V) of consecutive positions, P in all, at most `logits_rows` at once."""

    @abstractmethod
    def step(self, ids: Tensor, groups: Sequence[RowGroup[Any]]) -> Tensor:
        """ids (n,): the newest token of each row in all groups -> logits (n, V).

        Writes the next position, which must be reserved, without changing the groups' lengths.
        """


class FusedDecoder(Decoder):
    """Fuses the projections of Llama, Mistral, Qwen2 and Qwen3: a fifth of the module tree's operations.

    Weights are (in, out), inputs (N, in).
    """

    spread = 1.25

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype = torch.float32, *, shares: bool = False
    ) -> None:
        """`shares`: use the model's own weights, which must be frozen and of `dtype`."""
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
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> StepGraphs | None:
        return StepGraphs(partial(cuda_graph, self.device)) if self.device.type == "cuda" else None

    def with_adapter(self, adapter: AdapterTensors) -> FusedDecoder:
        other = copy.copy(self)
        other._graphs = other._new_graphs()
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
            # q and k are normalized in one operation: (heads + kv_heads, D)
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
        """cos and sin (positions, 1, D). sin carries rotate_half's sign, so only a roll is left."""
        ids = torch.arange(positions, device=self._embedding.device)[None]
        cos, sin = base.rotary_emb(self._embedding[:1, None], ids)
        half = self._head_dim // 2
        signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return cos[0, :, None].contiguous(), signed[:, None].contiguous()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _with_lora(self, output: Tensor, h: Tensor, index: int, kind: str) -> Tensor:
        return _plus(output, h, self._lora[index].get(kind)) if self._lora else output

    def _qkv(self, h: Tensor, index: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """h (N, C) -> rotated q and k (N, heads + kv_heads, D), v (N, kv_heads, D)."""
        layer = self._layers[index]
        flat = (
            product(h, layer["qkv"].t())
            if layer["qkv_bias"] is None
            else sum_with_product(layer["qkv_bias"], h, layer["qkv"])
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
        gate, up = self._with_lora(product(h, layer["gate_up"].t()), h, index, "gate_up").chunk(2, dim=-1)
        h = F.silu(gate) * up
        return self._with_lora(sum_with_product(x, h, layer["down"]), h, index, "down")

    def _logits(self, x: Tensor) -> Tensor:
        h = self._rms(x, self._final_norm)
        return _plus(product(h, self._head.t()), h, self._head_lora)

    def prefill(
        self, ids: Tensor, lengths: Tensor, past: RowState | None = None, begin: int = 0
    ) -> tuple[Tensor, list[RowState]]:
        x, keys, values = self._hidden(ids, past, begin)
        last = x[torch.arange(len(ids), device=ids.device), lengths - 1]
        states: list[RowState] = [
            [LayerState(k[row, :, :end], v[row, :, :end]) for k, v in zip(keys, values, strict=True)]
            for row, end in enumerate((lengths + begin).tolist())
        ]
        return self._logits(last), states

    def score(self, ids: Tensor) -> Iterator[Tensor]:
        hidden = self._hidden(ids[None], keep=False)[0][0]
        for part in hidden.split(logits_rows(self._head.shape[1], self.device)):
            yield self._logits(part)

    def _hidden(
        self, ids: Tensor, past: RowState | None = None, begin: int = 0, *, keep: bool = True
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """ids (B, P) -> hidden states (B, P, C); with `keep`, also all keys and values per layer (B,
        kv_heads, begin + P, D).
        """
        B, P = ids.shape
        x = self._embedding[ids.reshape(-1)]  # (B*P, C)
        cos, sin = (table[begin : begin + P].repeat(B, 1, 1) for table in (self._cos, self._sin))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            qk, v = self._qkv(self._rms(x, layer["norm_1"]), index, cos, sin)
            qk = qk.view(B, P, -1, self._head_dim).transpose(1, 2)  # (B, heads + kv_heads, P, D)
            v = v.reshape(B, P, self._kv_heads, self._head_dim).transpose(1, 2)
            q, k = qk.split([self._heads, self._kv_heads], dim=1)
            if past is not None:
                k, v = _after(past[index].keys, k), _after(past[index].values, v)
            # Causal attention hides right padding from real positions.
            o = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if past is None else causal_lower_right(P, begin + P),
                is_causal=past is None,
                enable_gqa=self._heads != self._kv_heads,
            )
            h = o.transpose(1, 2).reshape(B * P, -1)
            x = self._with_lora(sum_with_product(x, h, layer["out"]), h, index, "out")
            x = self._mlp(x, index)
            if keep:
                keys.append(k.contiguous())  # Views would keep the queries too.
                values.append(v.contiguous())
        return x.view(B, P, -1), keys, values

    def step(self, ids: Tensor, groups: Sequence[RowGroup[Any]]) -> Tensor:
        if self._graphs is not None:
            logits = self._graphs.step(self._step_of_storage, ids, groups)
            if logits is not None:
                return logits
        return self._step(ids, groups, [_Places.of(group, self.device, self.dtype) for group in groups])

    def _step_of_storage(
        self, ids: Tensor, lengths: Sequence[Tensor], groups: Sequence[RowGroup[Any]]
    ) -> Tensor:
        places = [
            _Places.of_storage(each, group.room_for_tokens, self.dtype)
            for each, group in zip(lengths, groups, strict=True)
        ]
        return self._step(ids, groups, places)

    def _step(self, ids: Tensor, groups: Sequence[RowGroup[Any]], places: Sequence[_Places]) -> Tensor:
        x = self._embedding[ids]  # (n, C)
        lengths = places[0].lengths if len(places) == 1 else torch.cat([each.lengths for each in places])
        cos, sin = self._cos[lengths], self._sin[lengths]
        sizes = [each.n for each in places]
        for index, layer in enumerate(self._layers):
            qk, v = self._qkv(self._rms(x, layer["norm_1"]), index, cos, sin)
            q, k = qk.split([self._heads, self._kv_heads], dim=1)
            if len(groups) == 1:
                o = self._attend_in(groups[0].layers[index], places[0], q, k, v)
            else:
                kept = [group.layers[index] for group in groups]
                parts = zip(kept, places, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
                o = torch.cat([self._attend_in(*part) for part in parts])
            x = self._with_lora(sum_with_product(x, o, layer["out"]), o, index, "out")
            x = self._mlp(x, index)
        return self._logits(x)

    def _attend_in(self, kept: LayerCache, places: _Places, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v of a group's newest tokens -> (n, heads * D)."""
        n, longest = places.n, places.longest
        if places.mask is None:
            kept.keys[0, :, longest] = k[0]
            kept.values[0, :, longest] = v[0]
        else:
            kept.keys[places.rows, :, places.lengths] = k
            kept.values[places.rows, :, places.lengths] = v
        return self._attend(
            q, kept.keys[:n, :, : longest + 1], kept.values[:n, :, : longest + 1], places.mask
        )

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q (n, heads, D); keys, values (n, kv_heads, T, D); mask (n, 1, 1, T) -> (n, heads * D)."""
        n = len(q)
        grouped = q.view(n, self._kv_heads, -1, self._head_dim)
        o = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return o.reshape(n, -1)


@dataclass(frozen=True, slots=True)
class _Places:
    n: int
    rows: Tensor
    """(n,)"""

    lengths: Tensor
    """(n,): tokens before the newest one."""

    longest: int
    mask: Tensor | None
    """(n, 1, 1, longest + 1); None: a single row attends to everything."""

    @classmethod
    def of(cls, group: RowGroup[Any], device: torch.device, dtype: torch.dtype) -> _Places:
        lengths = torch.tensor(group.lengths, device=device)
        n, longest = len(group.lengths), group.longest
        mask = attention_mask(lengths, longest, dtype) if n > 1 else None
        return cls(n, torch.arange(n, device=device), lengths, longest, mask)

    @classmethod
    def of_storage(cls, lengths: Tensor, tokens: int, dtype: torch.dtype) -> _Places:
        rows = torch.arange(len(lengths), device=lengths.device)
        return cls(len(rows), rows, lengths, tokens - 1, attention_mask(lengths, tokens - 1, dtype))


def _after(past: Tensor | None, new: Tensor) -> Tensor:
    """Put a past (kv_heads, M, D) before each row of (B, kv_heads, P, D)."""
    return new if past is None else torch.cat([past.expand(len(new), -1, -1, -1), new], dim=2)


_Factors = tuple[Tensor, Tensor]
"""An adapter adds h @ (in, ranks) @ (ranks, out) to a product of h (N, in), in float32."""


def _factors(adapter: AdapterTensors, names: Sequence[str], widths: Sequence[int]) -> _Factors | None:
    """Return the factors for modules fused into one weight; None if the adapter has none of them."""
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
    return output.add_(h.float() @ factors[0] @ factors[1])


@dataclass(slots=True)
class _Tree:
    adapter: AdapterTensors | None = None


class HubDecoder(Decoder):
    spread = 4  # Each group is a forward pass.

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype = torch.float32,
        *,
        shares: bool = False,
        routing: Routing | None = None,
    ) -> None:
        self.device, self.dtype, self.routing = model.device, dtype, routing
        self._adapter: AdapterTensors | None = None
        self._tree = _Tree()
        if shares:
            self._model = model
            return
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        # Buffers keep their dtype, so rotary frequencies stay exact.
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)

    def with_adapter(self, adapter: AdapterTensors) -> HubDecoder:
        other = copy.copy(self)
        other._adapter = adapter
        return other

    def forget(self) -> None:
        self._tree.adapter = None

    def _apply(self) -> None:
        """Walks the tree only if necessary, because that takes as long as a step."""
        if self._adapter is not None and self._tree.adapter is not self._adapter:
            self._tree.adapter = None
            _put_into_tree(self._model, self._adapter)
            self._tree.adapter = self._adapter

    @property
    def is_recurrent(self) -> bool:
        return LayerKinds.of(self._model.config).are_recurrent

    def prefill(
        self, ids: Tensor, lengths: Tensor, past: RowState | None = None, begin: int = 0
    ) -> tuple[Tensor, list[RowState]]:
        self._apply()
        kinds = LayerKinds.of(self._model.config)
        if past is not None and kinds.are_recurrent:
            return self._prefill_by_steps(ids, past, begin)
        if not kinds.are_recurrent and not (past is not None and kinds.width):
            return self._prefill(ids, lengths, kinds, past, begin)
        # One length at a time: padding would enter a state, and push tokens out of a window's cache.
        logits: list[Tensor] = []
        states: list[RowState] = []
        order: list[int] = []
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero()[:, 0]
            found, of_rows = self._prefill(ids[rows, :length], lengths[rows], kinds, past, begin)
            logits.append(found)
            states += of_rows
            order += rows.tolist()
        places = np.argsort(order)
        return torch.cat(logits)[places], [states[place] for place in places]

    def _prefill(
        self, ids: Tensor, lengths: Tensor, kinds: LayerKinds, past: RowState | None = None, begin: int = 0
    ) -> tuple[Tensor, list[RowState]]:
        if past is None:
            cache = _prefill_cache(self._model.config, kinds)
        else:
            cache = _cache_after(self._attended(past), begin, len(ids))
        positions = torch.arange(begin, begin + ids.shape[1], device=ids.device).expand(ids.shape)
        with self._recorded() as choices:
            output = backbone_output(
                self._model,
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                **({} if past is None else {"position_ids": positions}),
            )
        last = output.last_hidden_state[torch.arange(len(ids), device=ids.device), lengths - 1]
        logits = head_logits(self._model, output, last[:, None])[:, 0]
        layers: list[Any] = list(cache.layers)
        states = [
            [_state_of(layer, row, begin + end, kinds.window(index)) for index, layer in enumerate(layers)]
            for row, end in enumerate(lengths.tolist())
        ]
        if self.routing is not None:
            chosen = torch.stack(choices).to(self.routing.dtype).unflatten(1, ids.shape)  # (L, B, P, k)
            for state, of_row, end in zip(states, chosen.unbind(1), lengths.tolist(), strict=True):
                layer = [_choices(of_row[:, :end])]
                state += layer if past is None else joined([past[-1:], layer])
        return logits, list[RowState](states)

    def _recorded(self) -> AbstractContextManager[list[Tensor]]:
        return nullcontext([]) if self.routing is None else self.routing.recorded(self._model)

    def _attended(self, layers: Sequence[LayerT]) -> Sequence[LayerT]:
        return layers if self.routing is None else layers[:-1]

    def _prefill_by_steps(self, ids: Tensor, past: RowState, begin: int) -> tuple[Tensor, list[RowState]]:
        """The library's recurrent layers take several tokens at once only at the start of a text."""
        cache: KVCache[int] = KVCache()
        cache.add([0], past, begin)
        logits = ids.new_empty(0)
        for token in ids[0].split(1):
            cache.grow()
            logits = self.step(token, cache.groups)
            cache.advance()
        return logits, [cache.state(0)]

    def score(self, ids: Tensor) -> Iterator[Tensor]:
        self._apply()
        output = backbone_output(self._model, input_ids=ids[None], use_cache=False)
        rows = logits_rows(text_config_of(self._model).vocab_size, self.device)
        for part in output.last_hidden_state.split(rows, dim=1):
            yield head_logits(self._model, output, part)[0]

    def step(self, ids: Tensor, groups: Sequence[RowGroup[Any]]) -> Tensor:
        self._apply()
        parts = ids.split([len(group.rows) for group in groups])
        return torch.cat([self._step(part, group) for part, group in zip(parts, groups, strict=True)])

    def _step(self, ids: Tensor, group: RowGroup[Any]) -> Tensor:
        kinds = LayerKinds.of(self._model.config)
        lengths, longest = torch.tensor(group.lengths, device=self.device), group.longest
        with self._recorded() as choices:
            output: Any = self._model(
                input_ids=ids[:, None],
                position_ids=lengths[:, None],
                attention_mask=kinds.masks(partial(_step_mask, kinds, lengths, longest, self.dtype)),
                past_key_values=_SlotCache(self._attended(group.layers), lengths, longest),
                use_cache=True,
            )
        if choices:
            stored = group.layers[-1].keys
            rows = torch.arange(len(lengths), device=self.device)
            stored[rows, :, lengths] = torch.stack(choices, 1).to(stored.dtype)
        return output.logits[:, -1]


def _prefill_cache(config: Any, kinds: LayerKinds) -> DynamicCache:
    """Keeps all positions, even with a window, because rows are right-padded."""
    if not kinds.are_recurrent:
        return DynamicCache()
    cache = DynamicCache(config=config)
    cache.layers = [
        DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in cache.layers
    ]
    return cache


def _cache_after(past: RowState, begin: int, rows: int) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = []
    for state in past:
        layer: Any = DynamicLayer()
        if state.window is not None:
            layer = DynamicSlidingWindowLayer(state.window)
            layer.cumulative_length = begin
        if state.keys is not None and state.values is not None:
            layer.lazy_initialization(state.keys, state.values)
            # The window includes the next token.
            first = 0 if state.window is None else max(0, state.keys.shape[1] - state.window + 1)
            layer.keys, layer.values = (
                each[:, first:].expand(rows, -1, -1, -1) for each in (state.keys, state.values)
            )
        cache.layers.append(layer)
    return cache


def _state_of(layer: Any, row: int, end: int, window: int | None) -> LayerState:
    states = (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None))
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    begin = 0 if window is None or layer.is_sliding else max(0, end - window)
    return LayerState(
        None if keys is None else keys[row, :, begin:end],
        None if values is None else values[row, :, begin:end],
        tuple(each[row] for each in states if each is not None),
        window,
    )


def _choices(ids: Tensor) -> LayerState:
    return LayerState(ids, ids.new_empty(0, ids.shape[1], 0))


def _step_mask(kinds: LayerKinds, lengths: Tensor, longest: int, dtype: torch.dtype, kind: str) -> Tensor:
    """A ring holds exactly its window, in places filled from the first."""
    mask = attention_mask(lengths, longest, dtype)
    if kind == SLIDING:
        return mask[..., : kinds.width]
    queries = lengths[:, None]
    distances = queries - torch.arange(longest + 1, device=lengths.device)
    hidden = kinds.hides(kind, distances, queries)
    return mask if hidden is None else mask.masked_fill(hidden[:, None, None], -torch.inf)


def _put_into_tree(model: PreTrainedModel, adapter: AdapterTensors) -> None:
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


class _SlotLayer(DynamicLayer):
    """A group's layer for one step: writes row i's position lengths[i], returns [0, longest] or a window."""

    def __init__(self, kept: LayerCache, lengths: Tensor, longest: int) -> None:
        super().__init__()
        self._kept, self._longest = kept, longest
        self._places = lengths if kept.window is None else lengths % kept.window
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """States (n, kv_heads, 1, D) -> all keys and values (n, kv_heads, places, D)."""
        kept, n, end = self._kept, len(self._rows), self._kept.places(self._longest + 1)
        kept.keys[self._rows, :, self._places] = key_states[:, :, 0]
        kept.values[self._rows, :, self._places] = value_states[:, :, 0]
        return kept.keys[:n, :, :end], kept.values[:n, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._longest + query_length, 0

    def get_seq_length(self) -> int:
        return self._longest

    def get_max_cache_shape(self) -> int:
        return -1


class _SlotState(LinearAttentionLayer):
    is_sliding = False

    def __init__(self, kept: LayerCache, rows: int) -> None:
        super().__init__()
        _take_states(self, kept, rows)


class _SlotLayerWithState(_SlotLayer, LinearAttentionLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    def __init__(self, kept: LayerCache, lengths: Tensor, longest: int) -> None:
        LinearAttentionLayer.__init__(self)
        _SlotLayer.__init__(self, kept, lengths, longest)
        _take_states(self, kept, len(lengths))


def _take_states(layer: LinearAttentionLayer, kept: LayerCache, rows: int) -> None:
    views = [state[:rows] for state in kept.states]
    layer.has_previous_state = bool(views)
    if views:
        layer.conv_states, layer.is_conv_states_initialized = views[0], True
        layer.conv_kernel_size = views[0].shape[-1]
    if len(views) > 1:
        layer.recurrent_states, layer.is_recurrent_states_initialized = views[1], True


class _SlotCache(Cache):
    def __init__(self, of_group: Sequence[LayerCache], lengths: Tensor, longest: int) -> None:
        layers: list[Any] = []
        for kept in of_group:
            if not kept.keys.numel():
                layers.append(_SlotState(kept, len(lengths)))
            elif kept.states:
                layers.append(_SlotLayerWithState(kept, lengths, longest))
            else:
                layers.append(_SlotLayer(kept, lengths, longest))
        super().__init__(layers=layers)


def backbone_output(model: PreTrainedModel, **inputs: Any) -> Any:
    """Return the head's input, `last_hidden_state` (B, N, C), and more."""
    return _backbone(model)(**inputs)


def _backbone(model: PreTrainedModel) -> Any:
    own: Any = model.get_decoder()
    if own is model or model.config.get_text_config() is not model.config:
        own = model.base_model
    return model.get_submodule("model") if own is model else own


def head_logits(model: PreTrainedModel, output: Any, hidden: Tensor) -> Tensor:
    """Logits (B, n, V) of some states (B, n, C) in `output`, with the model's own scales and caps."""
    part = type(output)(**{**output, "last_hidden_state": hidden})
    with redirected(_backbone(model), lambda *_, **__: part):
        result: Any = type(model).forward(model, use_cache=False)
    return result.logits


def logits_rows(vocabulary: int, device: torch.device) -> int:
    return max(1, (LOGITS_ENTRIES if device.type == "cpu" else LOGITS_ENTRIES_OF_DEVICES) // vocabulary)


def attention_mask(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """Return (n, 1, 1, longest + 1): 0 at positions <= lengths[i], -inf beyond."""
    beyond = torch.arange(longest + 1, device=lengths.device) > lengths[:, None]
    return torch.zeros_like(beyond, dtype=dtype).masked_fill_(beyond, float("-inf"))[:, None, None]


def decoder_for(
    model: PreTrainedModel, own: OwnLogits | None = None, *, frozen: bool
) -> type[FusedDecoder | HubDecoder]:
    """Return the fastest kind of decoder that gives the model's own logits, up to rounding.

    Copies no weights of a `frozen` model. Raises EngineError, with the differences, if every kind fails.
    """
    kinds = (FusedDecoder, HubDecoder) if can_be_fused(model) else (HubDecoder,)
    own = own or own_logits(model)
    if not own.windows:
        raise EngineError(
            f"model type {model.config.model_type!r} cannot be decoded exactly: some of its layers attend to "
            "a part of the text, and no setting of its config changes which"
        )
    found: dict[str, str] = {}
    for kind in kinds:
        try:
            with narrowed_windows(model):
                gap, limit = decoder_gap(own, kind(model, model.dtype, shares=frozen)), own.limit
        except FORWARD_ERRORS as error:
            found[kind.__name__] = f"{type(error).__name__}: {error}"
            continue
        if gap <= limit:
            return kind
        found[kind.__name__] = f"{gap:.2g} nats, with {limit:.2g} allowed"
    raise EngineError(
        f"model type {model.config.model_type!r} cannot be decoded exactly in {str(model.dtype)[6:]}: log "
        f"probabilities differ from the model's own by {found}; ALiBi and encoder-decoder models are not "
        "supported"
    )


def can_be_fused(model: PreTrainedModel) -> bool:
    return model.config.model_type in FUSED_MODEL_TYPES and not is_quantized(model)


def text_config_of(model: PreTrainedModel) -> Any:
    config: Any = model.config.get_text_config()
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise EngineError(f"the config of model type {model.config.model_type!r} names no vocab_size")
    return config


@dataclass(frozen=True, slots=True)
class OwnLogits:
    """A model's own logits for sequences that branch at two depths, with narrowed windows."""

    ids: Tensor
    """(4, 12) random ids; all share the first 4, the first two share 8."""

    logits: Tensor
    """(4, 12, V)"""

    limit: float
    windows: bool = True
    """Whether all windows could be narrowed enough to matter in short texts."""


@torch.no_grad()
def own_logits(model: PreTrainedModel) -> OwnLogits:
    """Return the logits, with a tolerance from the noise of flipping the embeddings' last bit.

    Another batch shape often changes no bits.
    """
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config_of(model).vocab_size, (4, 12), generator=random)
    ids[1:, :4] = ids[0, :4]
    ids[1, 4:8] = ids[0, 4:8]
    ids = ids.to(model.device)

    def by_a_bit(_module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        signs = torch.randint(2, embedded.shape, generator=random).to(embedded.device) * 2 - 1
        return embedded + embedded * (signs * torch.finfo(embedded.dtype).eps).to(embedded.dtype)

    whole: Tensor | None = None
    with ExitStack() as undo:
        try:
            if is_local(model.config):
                whole = model(input_ids=ids, use_cache=False).logits
                undo.enter_context(narrowed_windows(model))
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
            undo.callback(model.get_input_embeddings().register_forward_hook(by_a_bit).remove)
            noisy: Tensor = model(input_ids=ids, use_cache=False).logits
        except FORWARD_ERRORS as error:
            raise EngineError(
                f"model type {model.config.model_type!r} gives no logits for a text: "
                f"{type(error).__name__}: {error}"
            ) from error
    factor = PROOF_FACTOR if logits.dtype == torch.float32 else PROOF_FACTOR_OF_HALF
    limit = min(PROOF_FLOOR + factor * distance(logits, noisy), PROOF_CEILING)
    return OwnLogits(ids, logits, limit, windows=whole is None or not torch.equal(whole, logits))


@torch.no_grad()
def decoder_gap(own: OwnLogits, decoder: Decoder) -> float:
    ids, device = own.ids, own.ids.device
    rows = torch.arange(len(ids), device=device)
    lengths = torch.tensor([8, 7, 5, 3], device=device)
    logits, states = decoder.prefill(ids[:, :8], lengths)
    compared = [(own.logits[rows, lengths - 1], logits)]
    logits, (states[2],) = decoder.prefill(ids[2:3, 5:8], lengths.new_tensor([3]), states[2], 5)
    compared.append((own.logits[2:3, 7], logits))
    lengths[2] = 8
    cache: KVCache[int] = KVCache()
    for row, (state, length) in enumerate(zip(states, lengths.tolist(), strict=True)):
        cache.add([row], state, length)
    for _ in range(4):
        cache.grow()
        logits = decoder.step(ids[rows, lengths], cache.groups)
        compared.append((own.logits[rows, lengths], logits))
        cache.advance()
        lengths = lengths + 1
    wanted, found = (torch.cat(each) for each in zip(*compared, strict=True))
    return distance(wanted, found)


def distance(expected: Tensor, found: Tensor) -> float:
    """Root mean square difference of log probabilities in nats, weighted by probability because large
    vocabularies have outliers. NaN counts as infinite.
    """
    one, other = (each.flatten(0, -2).cpu().double().log_softmax(-1) for each in (expected, found))
    weights = (one.exp() + other.exp()) / 2
    gap = float((weights * (one - other) ** 2).sum(-1).mean().sqrt())
    return gap if math.isfinite(gap) else math.inf
