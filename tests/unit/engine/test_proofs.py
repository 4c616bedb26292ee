"""The proofs of decoders and shared rows pass real-sized models in both precisions, and no planted fault."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from real_sized import real_sized
from tinkerscript.engine.decoder import (
    AdapterTensors,
    Decoder,
    FusedDecoder,
    HubDecoder,
    decoder_for,
    decoder_gap,
    own_logits,
)
from tinkerscript.engine.kv_cache import RowGroup, RowState
from tinkerscript.engine.lora import LoraBase
from tinkerscript.engine.packing import attend_in_segments, shares_prefixes
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import EngineError

DTYPES = [torch.float32, torch.bfloat16]
SHAPE: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
}
CONFIGS = {"qwen3": Qwen3Config(**SHAPE), "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True)}


@lru_cache
def _made(family: str, largest_logit: float, dtype: torch.dtype) -> Any:
    return real_sized(CONFIGS[family], largest_logit, dtype)


def model_of(family: str, largest_logit: float, dtype: torch.dtype) -> Any:
    """A copy to break."""
    return copy.deepcopy(_made(family, largest_logit, dtype))


in_both_precisions = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
of_real_sizes = pytest.mark.parametrize(("logits", "dtype"), list(itertools.product([8, 40], DTYPES)))


@in_both_precisions
@pytest.mark.parametrize("logits", [1, 8, 16, 32, 40])
@pytest.mark.parametrize("family", CONFIGS)
def test_models_with_logits_of_any_size_are_proved(family: str, logits: float, dtype: torch.dtype) -> None:
    model = model_of(family, logits, dtype)
    assert shares_prefixes(model)
    assert attend_in_segments(model)
    assert decoder_for(model, frozen=True) is FusedDecoder
    own = own_logits(model)
    assert decoder_gap(own, HubDecoder(model, dtype)) <= own.limit


# Faults of a decoder: it is made from a model that is broken, and compared with the one that is not.


def ignore_positions(model: Any) -> None:
    model.model.rotary_emb.inv_freq.zero_()


def leave_out_a_layer(model: Any) -> None:
    del model.model.layers[1]


def scale_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= 1.25


def leave_out_the_norms_of_q_and_k(model: Any) -> None:
    for layer in model.model.layers:
        del layer.self_attn.q_norm


class OneTooEarly(FusedDecoder):
    """Writes and reads the cache one position before the newest token's."""

    def step(self, ids: Tensor, groups: Sequence[RowGroup[Any]]) -> Tensor:
        early = [replace(group, lengths=[length - 1 for length in group.lengths]) for group in groups]
        return super().step(ids, early)


class OneTooFew(FusedDecoder):
    """Does not attend to the newest token of a prompt when it decodes."""

    def prefill(
        self, ids: Tensor, lengths: Tensor, past: RowState | None = None, begin: int = 0
    ) -> tuple[Tensor, list[RowState]]:
        logits, states = super().prefill(ids, lengths, past, begin)
        for layer in (layer for state in states for layer in state):
            for each in (layer.keys, layer.values):
                assert each is not None
                each[:, -1] = 0
        return logits, states


FAULTS: dict[str, tuple[Callable[[Any], None], type[FusedDecoder]]] = {
    "positions ignored": (ignore_positions, FusedDecoder),
    "a layer left out": (leave_out_a_layer, FusedDecoder),
    "a wrong scale of attention": (scale_attention, FusedDecoder),
    "no norm of q and k": (leave_out_the_norms_of_q_and_k, FusedDecoder),
    "the cache off by one": (lambda _: None, OneTooEarly),
    "a token of the cache lost": (lambda _: None, OneTooFew),
}


@of_real_sizes
@pytest.mark.parametrize("fault", FAULTS)
def test_a_decoder_with_a_fault_is_refused(fault: str, logits: float, dtype: torch.dtype) -> None:
    model, broken = (model_of("qwen3", logits, dtype) for _ in range(2))
    plant, kind = FAULTS[fault]
    plant(broken)
    own = own_logits(model)
    assert decoder_gap(own, kind(broken, dtype)) > own.limit


@of_real_sizes
def test_a_model_that_the_fused_decoder_misreads_gets_its_own_forward_pass(
    logits: float, dtype: torch.dtype
) -> None:
    model = model_of("llama", logits, dtype)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.25
    assert decoder_for(model, frozen=True) is HubDecoder


class Louder(FusedDecoder):
    """Takes adapters for a quarter stronger than they are."""

    def with_adapter(self, adapter: AdapterTensors) -> FusedDecoder:
        return super().with_adapter(AdapterTensors(adapter.scale * 1.25, adapter.modules, adapter.slot))


@of_real_sizes
@pytest.mark.parametrize("kind", [FusedDecoder, HubDecoder])
def test_adapters_are_proved(kind: type[Decoder], logits: float, dtype: torch.dtype) -> None:
    base = LoraBase(model_of("qwen3", logits, dtype), Path("base"), kind)
    base.prove(LoraSettings(4))
    adapter = base.new_adapter(LoraSettings(4))
    adapter.exaggerate()
    adapter.activate()
    own = own_logits(base.model)
    assert 0 <= decoder_gap(own, adapter.decoder()) <= own.limit


@of_real_sizes
def test_a_wrong_scale_of_adapters_is_refused(logits: float, dtype: torch.dtype) -> None:
    base = LoraBase(model_of("qwen3", logits, dtype), Path("base"), Louder)
    with pytest.raises(
        EngineError, match=r"cannot be decoded exactly with an adapter: .* nats, with .* allowed"
    ):
        base.prove(LoraSettings(4))


@of_real_sizes
@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_rows_are_not_shared_by_a_model_that_ignores_what_they_need(
    ignored: str, logits: float, dtype: torch.dtype
) -> None:
    model = model_of("llama", logits, dtype)

    def without(_module: Any, inputs: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {name: value for name, value in given.items() if name != ignored}

    model.model.register_forward_pre_hook(without, with_kwargs=True)
    assert not shares_prefixes(model)
    assert not attend_in_segments(model)


@in_both_precisions
def test_nothing_is_proved_of_a_model_that_computes_no_numbers(dtype: torch.dtype) -> None:
    model = model_of("llama", 8, dtype)
    model.model.norm.weight.data.fill_(torch.nan)
    assert not shares_prefixes(model)
    with pytest.raises(EngineError, match="cannot be decoded exactly"):
        decoder_for(model, frozen=True)
