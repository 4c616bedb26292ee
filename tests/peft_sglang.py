"""The fake of SGLang over a real model, with adapters applied by PEFT, or another in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fake_sglang import FakeSglang
from inference_fakes import Distribution, Faults, Floats


class AdapterModel:
    """A Hugging Face model and its adapters. One caller at a time."""

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        """`weights`: another folder, which has them but no tokenizer."""
        self._base = AutoModelForCausalLM.from_pretrained(weights or folder, dtype=torch.float32)
        self._tuned: PeftModel | None = None
        self._loaded = set[Path]()
        self.end = int(AutoTokenizer.from_pretrained(folder).eos_token_id)

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


class PeftSglang(FakeSglang):
    """Serves a model's folder."""

    def __init__(self, folder: Path, faults: Faults | None = None) -> None:
        self.model, self._folder, self._loaded = AdapterModel(folder), folder, ""
        self.lies: dict[str, str] = {}
        """Adapter -> the one that is applied in its place."""

        self.instead: dict[str, Path] = {}
        """Name of all weights -> those that are loaded in their place."""

        super().__init__(AdapterDistribution(0, self.model.end, model=self.model), faults)

    def _generated(self, body: dict[str, Any]) -> Any:
        if self.weights is not None and self.weights.name != self._loaded:
            actual = self.instead.get(self.weights.name, self.weights)
            self.model, self._loaded = AdapterModel(self._folder, actual), self.weights.name
        name = body.get("lora_path", "")
        path = self.adapters.get(self.lies.get(name, name))
        self.distribution = AdapterDistribution(0, self.model.end, model=self.model, adapter=path)
        return super()._generated(body)
