"""Small random models whose attention is sharp and whose logits are as large as a published model's.

Hugging Face starts a model with weights of 0.02: attention is then nearly uniform and logits stay below 1,
and whatever depends on them, such as rounding in bfloat16, looks harmless.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


@torch.no_grad()
def real_sized(config: PretrainedConfig, largest_logit: float, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the Llama family whose logits reach `largest_logit` in texts of random ids."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1 if "embed" in name else weight.shape[1] ** -0.5)
    ids = torch.randint(model.config.vocab_size, (4, 24))
    model.model.norm.weight *= largest_logit / float(model(input_ids=ids).logits.abs().max())
    for weight in model.parameters():  # Buffers keep their dtype, as when a model is loaded.
        weight.data = weight.data.to(dtype)
    return model
