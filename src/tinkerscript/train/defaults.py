"""Defaults that depend on the model's config.json (docs/training.md#the-learning-rate)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.model_folder import base_of_adapter, context_of

THREADS_OF_GPU = 4

# Smaller models tolerate rates that ruin larger ones within a few steps.
SMALL = 20_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    trains: str
    usual: float
    limit: float


# tinker_cookbook's `get_lr` for supervised training has this rate at this width.
ADAPTER_RATE, ADAPTER_WIDTH = 5e-4, 2000

# `get_lr` scales by (ADAPTER_WIDTH / width) to this power, and knows no other families.
ADAPTER_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}

# With this share, RL gets the cookbook's 4e-5 for Llama 3.1 8B.
SHARE_OF_RL = 0.14

TOO_HIGH = 20

SMALL_MODEL = Rates("all weights of a small model", 1e-4, 5e-3)

# TRL's and verl's default. Seven steps of random advantages move SmolLM2-135M by 1.2 nats per token at 1e-4,
# by 0.07 at 1e-5.
ALL_WEIGHTS = Rates("all weights", 1e-6, 2e-5)

ALL_WEIGHTS_SFT = Rates("all weights, supervised", 1e-5, 2e-4)


def rates_of(config: RunConfig, model: Path) -> Rates:
    # DPO ruins a model as fast as RL does.
    is_supervised = config.method == "sft" and not config.sft.dpo_beta
    if config.engine.backend == "tinker" or config.engine.lora.rank:
        settings = _model_config(model)
        width = _figure(settings, *_WIDTH, unknown=ADAPTER_WIDTH)
        family = str(settings.get("model_type"))
        exponent = next((power for name, power in ADAPTER_EXPONENTS.items() if family.startswith(name)), 0)
        rate = ADAPTER_RATE * (ADAPTER_WIDTH / width) ** exponent
        usual = float(f"{rate if is_supervised else SHARE_OF_RL * rate:.1e}")
        return Rates("a LoRA adapter", usual, TOO_HIGH * usual)
    if _is_small(model):
        return SMALL_MODEL
    return ALL_WEIGHTS_SFT if is_supervised else ALL_WEIGHTS


def parameters_of(model: dict[str, Any]) -> float:
    """Estimate the number; infinite if config.json lacks the figures."""
    width = _figure(model, *_WIDTH)
    layers = _figure(model, "num_hidden_layers", "n_layer", "n_layers")
    return 12 * layers * width**2 + _figure(model, "vocab_size") * width


_WIDTH = ("hidden_size", "n_embd", "d_model")


def _figure(model: dict[str, Any], *names: str, unknown: float = float("inf")) -> float:
    model = model | model.get("text_config", {})
    return next((float(model[name]) for name in names if model.get(name)), unknown)


def _is_small(model: Path) -> bool:
    return parameters_of(_model_config(model)) <= SMALL


def _model_config(model: Path) -> dict[str, Any]:
    return json.loads(((base_of_adapter(model) or model) / "config.json").read_text(encoding="utf-8"))


def resolved(config: RunConfig, model: Path) -> tuple[RunConfig, list[str]]:
    rates = rates_of(config, model)
    if not config.sampling.max_tokens:
        limit = 64 if _is_small(model) else min(config.sampling.reply_tokens, context_of(model) // 2)
        sampling = config.sampling.model_copy(update={"max_tokens": limit})
        config = config.model_copy(update={"sampling": sampling})
    if not config.engine.threads:
        engine = config.engine.model_copy(update={"threads": usual_threads(config, model)})
        config = config.model_copy(update={"engine": engine})
    if not config.training.learning_rate:
        training = config.training.model_copy(update={"learning_rate": rates.usual})
        config = config.model_copy(update={"training": training})
        chosen = [f"training.learning_rate: {rates.usual:g}, the usual one for {rates.trains}"]
    else:
        chosen = []
    return config, [*chosen, *_too_high(config, rates)]


def usual_threads(config: RunConfig, model: Path) -> int:
    """This device's share of the cores; with Ray less one, on which it places the server; few if a GPU
    computes; 1 for small models and remote engines.
    """
    engine = config.engine
    if engine.backend == "tinker" or _is_small(model):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = max(1, (cores - (config.cluster.launcher == "ray")) // engine.devices)
    return own if engine.device == "cpu" else min(own, THREADS_OF_GPU)


def _too_high(config: RunConfig, rates: Rates) -> Iterator[str]:
    named = {"training": config.training.learning_rate}
    named |= {f"roles.{name}": role.learning_rate for name, role in config.trained_roles.items()}
    for where, rate in named.items():
        if rate > rates.limit:
            yield (
                f"{where}.learning_rate: {rate:g} is too high for {rates.trains}: above {rates.limit:g} a "
                f"few steps ruin a model, so that it answers nothing; {rates.usual:g} is usual"
            )


# Share of the full rate, so that the last steps still learn.
FLOOR = 0.1


def learning_rate(config: TrainingConfig, step: int, *, steps: int) -> float:
    """The rate of `step`, which counts from 1: tinker_cookbook's schedule, after a linear warm-up that starts
    at 1 / (warmup_steps + 1), and never below `FLOOR`.
    """
    assert config.learning_rate, "a run replaces 0 before it begins (defaults.resolved)"
    warmup = config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / (warmup + 1)
    total = max(1, steps - warmup)
    done = min(step - 1 - warmup, total)
    share = compute_schedule_lr_multiplier(config.lr_schedule, done, total)
    return config.learning_rate * max(FLOOR, share)
