"""What `bench/memory.py` and the tests measure memory with: live tensors, and models of fake ones.

Bytes are those of tensors' storages, as operations of torch make and drop them; what a kernel takes inside of
one operation is not seen. Fake tensors have shapes and no data, so a model of any size can be measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from tinkerscript.engine.decoder import FusedDecoder
from tinkerscript.engine.kv_cache import CacheBudget
from tinkerscript.engine.lora import LoraBase
from tinkerscript.engine.losses import target_logprobs
from tinkerscript.engine.running_batch import Request, RunningBatch
from tinkerscript.engine.training import AllWeights, Weights
from tinkerscript.engine.weights import LoraSettings, checkpoint_activations


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive: those `add`ed, and those that operations made."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}
        for each in tensors:
            self.add(each)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.add(each)
        return result

    def peak_of(self, work: Callable[[], object]) -> int:
        """The peak while `work` runs."""
        self.peak = self.now
        with self:
            work()
        return self.peak


def qwen3(
    vocabulary: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **settings: Any,
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **({"max_position_embeddings": 4096, "tie_word_embeddings": True} | settings),
    )


def weights_of(
    config: PretrainedConfig,
    lora: LoraSettings | None,
    dtype: torch.dtype,
    *,
    checkpointing: bool,
    device: str,
) -> Weights:
    """Random weights of a model on `device`, which may be meta; `dtype` is that of a base under LoRA."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype if lora else torch.float32)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    if checkpointing:
        checkpoint_activations(model)
    return LoraBase(model, Path(), FusedDecoder).new_adapter(lora) if lora else AllWeights(model)


def make_fake(weights: Weights) -> None:
    """Put tensors of the fake mode that is on in place of those on the meta device; views stay views."""
    storages: dict[int, Tensor] = {}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in weights.model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is not None and id(old) not in made:
                    storage = old.untyped_storage()
                    whole = torch.empty(storage.nbytes() // old.itemsize, dtype=old.dtype)
                    whole = storages.setdefault(storage._cdata, whole)
                    new = whole.as_strided(old.shape, old.stride(), old.storage_offset())
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = new, old
                if old is not None:
                    table[name] = made[id(old)][0]  # type: ignore[assignment]
    weights.parameters = [each for each in weights.model.parameters() if each.requires_grad]


def tensors_of(weights: Weights) -> Iterable[Tensor]:
    return [*weights.model.parameters(), *weights.model.buffers()]


class TrainingSteps:
    """Forward and backward passes over `tokens`, in rows of `length`, and AdamW's steps, as the trainer's."""

    def __init__(
        self,
        weights: Weights,
        *,
        tokens: int,
        length: int,
        logits_rows: int | None = None,
        autocast: bool = False,
        entropies: bool = False,
    ) -> None:
        self._model, self._autocast, self._logits_rows = weights.model, autocast, logits_rows
        self._entropies = entropies
        self._optimizer = torch.optim.AdamW(weights.parameters, lr=1e-4, foreach=True)
        self._ids = torch.zeros(tokens // length, length, dtype=torch.long)
        self._targets = torch.zeros(tokens, dtype=torch.long)
        self._places = np.arange(tokens)

    def microbatch(self) -> None:
        with _not_packed(), torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            inputs = {"input_ids": self._ids, "use_cache": False}
            found = target_logprobs(
                self._model,
                inputs,
                self._places,
                self._targets,
                rows=self._logits_rows,
                with_entropies=self._entropies,
            )
        found.sum().backward()

    def with_labels(self) -> None:
        """The same by Hugging Face's own forward pass with labels."""
        with _not_packed():
            output: Any = self._model(input_ids=self._ids, labels=self._ids, use_cache=False)
        output.loss.backward()

    def step(self) -> None:
        self._optimizer.step()

    def peak(self, live: LiveBytes) -> int:
        """Of a step's second microbatch and of the step itself, with moments and gradients there."""
        with live:
            self.microbatch()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.microbatch()
        return max(live.peak_of(self.microbatch), live.peak_of(self.step))


def _not_packed() -> Any:
    """Where tensors are fake, transformers cannot see that no sequences are packed, and would make a mask."""
    return patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None)


def sampling_peak(
    weights: Weights, dtype: torch.dtype, *, rows: int, prompt: int, length: int, budget: int
) -> int:
    """Of `rows` rows with different prompts, when half of them are replaced while the others run, within a
    `budget` of bytes for keys and values."""
    live = LiveBytes(*tensors_of(weights))
    if not isinstance(weights, AllWeights):
        base: FusedDecoder = weights.base.decoder  # type: ignore[attr-defined]
        live.add(base._cos)
        live.add(base._sin)
    random = np.random.default_rng(0)
    vocabulary = int(weights.model.config.vocab_size)

    def wave() -> None:
        for _ in range(rows // 2):
            ids = tuple(random.integers(0, vocabulary, prompt).tolist())
            batch.submit(Request(ids, 1, length - prompt, 1.0, 1.0, -1, 1, frozenset(), ()))

    with live:
        with torch.no_grad():
            if isinstance(weights, AllWeights):
                decoder: Any = FusedDecoder(weights.model, dtype)
            else:
                decoder = weights.decoder()
        batch = RunningBatch(
            decoder,
            max_rows=rows,
            max_length=length,
            decode=str,
            random=random,
            budget=CacheBudget(budget),
        )
        wave()
        for _ in range(3):
            batch.advance()
        wave()
        for _ in range(length - prompt - 2):
            batch.advance()
        wave()
        while batch.busy:
            batch.advance()
    return live.peak
