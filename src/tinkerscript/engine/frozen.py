"""`FrozenModels` sample and score, but never train. Models over one base share it, even the run's own."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from tinkerscript.engine.context import EngineContext, exact_context, open_context
from tinkerscript.engine.decoder import decoder_for, own_logits
from tinkerscript.engine.image_features import ImageReader
from tinkerscript.engine.lora import LoraBase
from tinkerscript.engine.losses import TEMPERATURES
from tinkerscript.engine.packing import attend_in_segments, shares_prefixes
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient, freeze
from tinkerscript.engine.training import Trainer
from tinkerscript.engine.weights import LoraSettings, load_model

# The smallest adapter. A new one changes nothing.
NO_CHANGE = LoraSettings(rank=1, targets=("attn",))


class TopLogprobs(NamedTuple):
    """Position 0 has no context and is 0."""

    own: NDArray[np.float32]
    """[T]: the sequence's tokens."""

    ids: NDArray[np.int64]
    """[T, K]: the most probable tokens."""

    values: NDArray[np.float32]
    """[T, K]: their logprobs."""


class FrozenWeights:
    def __init__(
        self, base: FrozenBase, context: EngineContext, sampling: EmbeddedSamplingClient, trainer: Trainer
    ) -> None:
        self._base = base  # Keeps it alive in `FrozenModels`.
        self.context = context
        self.sampling = sampling
        self._trainer = trainer

    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperatures: Sequence[NDArray[np.float32]] | None = None,
    ) -> Future[list[NDArray[np.float32]]]:
        """Each token's logprob given all before it: int32 [T] in, float32 [T] out, 0 at position 0.

        `temperatures`, float32 [T] each, divide the logits. Raises EngineRequestError for a sequence that is
        too long or has unknown ids.
        """
        given = temperatures or [np.ones(len(ids), np.float32) for ids in sequences]
        return self.context.thread.call_in_slices(lambda: self._scoring(sequences, given))

    def top_logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperatures: Sequence[NDArray[np.float32]],
        top: int,
    ) -> Future[list[TopLogprobs]]:
        return self.context.thread.call_in_slices(lambda: self._scoring_top(sequences, temperatures, top))

    def _scoring_top(
        self, sequences: Sequence[NDArray[np.int32]], temperatures: Sequence[NDArray[np.float32]], top: int
    ) -> Generator[None, None, list[TopLogprobs]]:
        trainer = Trainer(self._trainer.weights, share_prefixes=self._base.shares_prefixes, top=top)
        datums = list(map(_every_token, sequences, temperatures))
        output = yield from trainer.slices(datums, "cross_entropy", None, backward=False)
        found: list[TopLogprobs] = []
        for ids, result in zip(sequences, output.loss_fn_outputs, strict=True):
            own, tokens = np.zeros(len(ids), np.float32), np.zeros((len(ids), top), np.int64)
            values = np.zeros((len(ids), top), np.float32)
            for whole, name in ((own, "logprobs"), (tokens, "top_ids"), (values, "top_logprobs")):
                whole[1:] = result[name].to_numpy().reshape(whole[1:].shape)
            found.append(TopLogprobs(own, tokens, values))
        return found

    def _scoring(
        self, sequences: Sequence[NDArray[np.int32]], temperatures: Sequence[NDArray[np.float32]]
    ) -> Generator[None, None, list[NDArray[np.float32]]]:
        scored = [row for row, ids in enumerate(sequences) if len(ids) > 1]
        datums = [_every_token(sequences[row], temperatures[row]) for row in scored]
        output = yield from self._trainer.slices(datums, "cross_entropy", None, backward=False)
        rows = [np.zeros(len(ids), np.float32) for ids in sequences]
        for row, result in zip(scored, output.loss_fn_outputs, strict=True):
            rows[row][1:] = result["logprobs"].to_numpy()
        return rows


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FrozenBase:
    lora: LoraBase
    context: EngineContext
    shares_prefixes: bool

    def with_adapter(self, folder: Path | None) -> FrozenWeights:
        """Call this on the engine's thread."""
        weights = self.lora.new_adapter(NO_CHANGE) if folder is None else self.lora.adapter_of(folder)
        decoder = self.lora.plain if folder is None else weights.decoder()
        trainer = Trainer(weights, share_prefixes=self.shares_prefixes)
        return FrozenWeights(self, self.context, freeze(self.context, lambda: decoder), trainer)


class FrozenModels:
    def __init__(
        self, context: EngineContext, own: FrozenBase | None, *, device: str, dtype: torch.dtype
    ) -> None:
        self._context = context
        self._own = own
        self._bases = WeakValueDictionary[Path, FrozenBase]()
        if own is not None:
            self._bases[context.folder.resolve()] = own
        self._device = device
        self._dtype = dtype
        self._loading = threading.Lock()

    def open(self, folder: Path, adapter: Path | None = None) -> FrozenWeights:
        """Load a model, on the caller's thread."""
        with self._loading:
            key = folder.resolve()
            base = self._bases.get(key)
            if base is None:
                base = self._bases[key] = self._load(folder)
        return self._context.thread.call(lambda: base.with_adapter(adapter)).result()

    def _load(self, folder: Path) -> FrozenBase:
        model = load_model(folder, device=self._device, dtype=self._dtype)
        own = own_logits(model)
        shares = shares_prefixes(model, own)
        if shares:
            attend_in_segments(model, own)
        lora = LoraBase(model, folder, decoder_for(model, own, frozen=True))
        mine = self._context
        context = open_context(
            model,
            folder,
            seed=0,
            max_batch=mine.max_batch,
            budget=mine.budget,
            max_context=exact_context(model.config),
            images=ImageReader(model, folder),
            thread=mine.thread,
        )
        return FrozenBase(lora, context, shares)


def _every_token(ids: NDArray[np.int32], temperatures: NDArray[np.float32]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(ids[1:].astype(np.int64)),
            "weights": tinker.TensorData.from_numpy(np.ones(len(ids) - 1, np.float32)),
            TEMPERATURES: tinker.TensorData.from_numpy(temperatures[1:].copy()),
        },
    )
