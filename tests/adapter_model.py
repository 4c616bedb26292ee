"""A real model as the distribution of a fake server, with adapters that PEFT applies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_fakes import Distribution, Floats


class AdapterModel:
    """A Hugging Face model and its adapters. One caller at a time."""

    def __init__(self, folder: Path) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tuned: PeftModel | None = None
        self._loaded = set[Path]()
        self.end = int(AutoTokenizer.from_pretrained(folder).eos_token_id)

    def load(self, files: Iterable[bytes]) -> None:
        """Replace the base model's weights with those in the contents of safetensors `files`."""
        for content in files:
            unexpected = self._base.load_state_dict(load(content), strict=False).unexpected_keys
            assert not unexpected, unexpected

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], adapter: Path | None) -> Floats:
        """Of the token after `ids`, float64 [V]."""
        if adapter is not None:
            self._activate(adapter)
            return self._last(self._tuned, ids)
        if self._tuned is None:
            return self._last(self._base, ids)
        with self._tuned.disable_adapter():
            return self._last(self._tuned, ids)

    def _activate(self, adapter: Path) -> None:
        name = adapter.name.replace(".", "_")
        if self._tuned is None:
            self._tuned = PeftModel.from_pretrained(self._base, str(adapter), adapter_name=name)
        elif adapter not in self._loaded:
            self._tuned.load_adapter(str(adapter), adapter_name=name)
        self._loaded.add(adapter)
        self._tuned.set_adapter(name)

    @staticmethod
    def _last(model: Any, ids: Sequence[int]) -> Floats:
        return np.asarray(model(torch.tensor([list(ids)])).logits[0, -1].double())


@dataclass(frozen=True)
class AdapterDistribution(Distribution):
    """The model's, by one adapter."""

    model: AdapterModel | None = None
    adapter: Path | None = None

    def logits(self, ids: Sequence[int]) -> Floats:
        assert self.model is not None
        return self.model.logits(ids, self.adapter)
