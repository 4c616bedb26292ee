"""Which learning rate is usual for what a run trains, and above which one it ruins the model.

Invariant: it reads a model's config.json alone, so that a plan and a run that has not begun can say it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.model_folder import base_of_adapter

SMALL = 20_000_000
"""Parameters up to which a model is small: it takes rates that ruin a larger one in a few steps."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of one kind of training."""

    trains: str
    usual: float
    limit: float
    """A higher one is too high by all experience."""


ADAPTER = Rates("a LoRA adapter", 1e-4, 2e-3)
"""tinker_cookbook's recipes have 4e-5 for reinforcement learning and 1e-4 to 2e-4 for supervised training;
its `get_lr` gives adapters ten times the rate of all weights."""

SMALL_MODEL = Rates("all weights of a small model", 1e-4, 5e-3)

ALL_WEIGHTS = Rates("all weights", 1e-6, 2e-5)
"""TRL's and verl's default. At 1e-4, SmolLM2-135M is 1.2 nats a token away from itself after seven steps of
random advantages; at 1e-5, 0.07."""

ALL_WEIGHTS_SFT = Rates("all weights, supervised", 1e-5, 2e-4)


def rates_of(config: RunConfig, model: Path) -> Rates:
    """The rates for what the run trains. `model`: its folder."""
    if config.engine.backend == "tinker" or config.engine.lora.rank:
        return ADAPTER
    settings = ((base_of_adapter(model) or model) / "config.json").read_text(encoding="utf-8")
    if parameters_of(json.loads(settings)) <= SMALL:
        return SMALL_MODEL
    return ALL_WEIGHTS_SFT if config.method == "sft" else ALL_WEIGHTS


def parameters_of(model: dict[str, Any]) -> float:
    """About how many parameters a decoder of this config.json has; infinite where it does not say."""
    model = model | model.get("text_config", {})

    def named(*names: str) -> float:
        return next((float(model[name]) for name in names if model.get(name)), float("inf"))

    width = named("hidden_size", "n_embd", "d_model")
    layers = named("num_hidden_layers", "n_layer", "n_layers")
    return 12 * layers * width**2 + named("vocab_size") * width


def resolved(config: RunConfig, model: Path) -> tuple[RunConfig, list[str]]:
    """The config with the usual rate where it has none, and what to say of its rates before the run begins.

    `model`: the folder of the model that trains.
    """
    rates = rates_of(config, model)
    if not config.training.learning_rate:
        training = config.training.model_copy(update={"learning_rate": rates.usual})
        config = config.model_copy(update={"training": training})
        chosen = [f"training.learning_rate: {rates.usual:g}, the usual one for {rates.trains}"]
    else:
        chosen = []
    return config, [*chosen, *_too_high(config, rates)]


def _too_high(config: RunConfig, rates: Rates) -> Iterator[str]:
    named = {"training": config.training.learning_rate}
    named |= {f"roles.{name}": role.learning_rate for name, role in config.trained_roles.items()}
    for where, rate in named.items():
        if rate > rates.limit:
            yield (
                f"{where}.learning_rate: {rate:g} is too high for {rates.trains}: above {rates.limit:g} a "
                f"few steps ruin a model, so that it answers nothing; {rates.usual:g} is usual"
            )


FLOOR = 0.1
"""Share of the full rate at which its decay stops: the last steps of a run should still learn."""


def learning_rate(config: TrainingConfig, step: int, *, steps: int) -> float:
    """The rate of `step`, counted from 1, in a run of `steps`.

    Step n of the warm-up has n / (warmup_steps + 1) of the full rate. After it comes tinker_cookbook's
    schedule over the remaining steps, never below a tenth of the full rate. Steps past the end
    keep the last rate.
    """
    assert config.learning_rate, "a run replaces 0 before it begins (learning_rates.resolved)"
    warmup = config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / (warmup + 1)
    total = max(1, steps - warmup)
    done = min(step - 1 - warmup, total)
    share = compute_schedule_lr_multiplier(config.lr_schedule, done, total)
    return config.learning_rate * max(FLOOR, share)
