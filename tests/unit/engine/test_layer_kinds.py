"""Windows, chunks and states: the proofs refuse a decoder, and a shared row, that gets one wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_helpers import family_model
from tinkerscript.engine.decoder import HubDecoder, decoder_for, own_logits
from tinkerscript.engine.kv_cache import KVCache, LayerCache, RowGroup, RowState
from tinkerscript.engine.layer_kinds import NARROW, LayerKinds, narrowed_windows
from tinkerscript.engine.packing import shares_prefixes
from tinkerscript.errors import EngineError


def no_ring(self: LayerCache, length: int) -> int:
    """All positions are kept, and attended to."""
    return length


def wider(self: LayerKinds, layer: int) -> int | None:
    return self.width + 1 if self.kinds[layer] == "sliding_attention" else None


def narrower(self: LayerKinds, layer: int) -> int | None:
    return self.width - 1 if self.kinds[layer] == "sliding_attention" else None


def never_too_far(self: LayerKinds, kind: str, distances: Tensor, queries: Tensor) -> None:
    """Nothing is hidden."""


ADD = RowGroup.add


def state_of_the_first_row(self: RowGroup[Any], rows: Sequence[Any], state: RowState, length: int) -> None:
    ADD(self, rows, state, length)
    for layer in self.layers:
        for each in layer.states:
            each[len(self.rows) - 1] = each[0]


FAULTS: list[tuple[str, type, str, Callable[..., Any]]] = [
    ("gpt-oss", LayerCache, "places", no_ring),
    ("gpt-oss", LayerKinds, "window", wider),
    ("Gemma 3 with a vision tower", LayerKinds, "window", narrower),
    ("Llama 4 (text)", LayerKinds, "hides", never_too_far),
    ("Qwen 3 Next", RowGroup, "add", state_of_the_first_row),
    ("LFM 2", RowGroup, "add", state_of_the_first_row),
    ("Falcon H1", RowGroup, "add", state_of_the_first_row),
]


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault"),
    FAULTS,
    ids=[f"{name}: {fault.__name__}" for name, _, _, fault in FAULTS],
)
def test_a_decoder_that_looks_too_far_or_not_far_enough_is_refused(
    name: str, owner: type, attribute: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(name)
    own = own_logits(model)
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises(EngineError, match="cannot be decoded exactly"):
        decoder_for(model, own, frozen=True)


@pytest.mark.parametrize("name", ["gpt-oss", "Mistral with a window", "Llama 4 (text)"])
def test_a_shared_row_that_looks_too_far_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(name)
    own = own_logits(model)
    assert shares_prefixes(model, own)
    monkeypatch.setattr(LayerKinds, "hides", never_too_far)
    assert not shares_prefixes(model, own)


def test_windows_are_narrow_for_the_proof_alone() -> None:
    model = family_model("gpt-oss")
    with narrowed_windows(model), narrowed_windows(model):
        assert LayerKinds.of(model.config).width == NARROW
        assert {layer.self_attn.sliding_window for layer in model.model.layers} == {NARROW, None}
    assert LayerKinds.of(model.config).width == 16
    assert {layer.self_attn.sliding_window for layer in model.model.layers} == {16, None}


def test_a_ring_is_not_the_storage_of_all_positions() -> None:
    model = family_model("gpt-oss")
    ids = torch.zeros(1, 48, dtype=torch.long)
    with torch.no_grad():
        _, (state,) = HubDecoder(model, shares=True).prefill(ids, torch.tensor([48]))
    cache: KVCache[int] = KVCache()
    cache.reserve([100], state)
    (group,) = cache.groups
    assert [layer.keys.shape[2] for layer in group.layers] == [16, 128]
    assert cache.bytes == sum(each.nbytes for layer in group.layers for each in (layer.keys, layer.values))
