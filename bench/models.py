"""Models that the benchmarks make, and what the machine can do at best."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from tinkerscript.model_folder import TINY_MODEL


def make_model(folder: Path, config: Qwen3Config | None = None) -> Path:
    """A model of random parameters (20 million, Qwen3-shaped) with the tiny model's tokenizer."""
    torch.manual_seed(0)
    config = config or Qwen3Config(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=761,
        pad_token_id=759,
    )
    folder.mkdir(parents=True, exist_ok=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TINY_MODEL / name, folder / name)
    return folder


@torch.no_grad()
def make_loud_model(folder: Path, largest_logit: float) -> Path:
    """`make_model`, with sharp attention and logits that reach `largest_logit`, as published models have."""
    config: Any = AutoConfig.from_pretrained(make_model(folder))
    config.tie_word_embeddings = False  # A tied head of random weights only repeats the last token.
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1 if "embed" in name else weight.shape[1] ** -0.5)
    ids = torch.randint(model.config.vocab_size, (4, 32))
    model.model.norm.weight *= largest_logit / model(input_ids=ids).logits.abs().max()
    model.save_pretrained(folder)
    return folder


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of this process while `work` runs: with one thread, what it takes on an idle machine."""
    began = time.process_time()
    work()
    return time.process_time() - began


@torch.inference_mode()
def matrix_rate(size: int = 1024) -> float:
    """Operations a second of a square float32 product, counting a multiplication and an addition as two."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / processor_seconds(lambda: left @ right)


@torch.inference_mode()
def read_bandwidth(mebibytes: int = 256) -> float:
    """Bytes a second that a vector's sum reads from memory that no cache holds."""
    vector = torch.ones(mebibytes * 2**18)
    return mebibytes * 2**20 / processor_seconds(vector.sum)


def measured(function: Callable[[], float], rounds: int) -> float:
    function()
    return statistics.median(function() for _ in range(rounds))
