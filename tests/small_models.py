"""Small models with random weights, of any architecture that transformers has, and what they train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
import torch
import transformers

SHAPE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}


def small_config(name: str, **changes: Any) -> transformers.PretrainedConfig:
    """The config of the architecture `name`, as `Qwen3`; one of several models says everything itself."""
    settings = changes if "text_config" in changes else SHAPE | changes
    return getattr(transformers, f"{name}Config")(**settings)


def small_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(small_config(name, **changes)).eval()


def sft_datum(ids: Sequence[int] | np.ndarray) -> tinker.Datum:
    """`cross_entropy` on every token after the first."""
    known = np.asarray(ids, np.int64)
    inputs: Any = {"target_tokens": known[1:], "weights": np.ones(len(known) - 1, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(known[:-1].tolist()), loss_fn_inputs=inputs)
