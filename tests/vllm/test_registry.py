"""What docs/models.md says of vLLM and each family, against vLLM's own registry."""

from __future__ import annotations

import pytest
import torch
import transformers
from vllm.model_executor.models.interfaces import supports_lora  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]

from model_families import FAMILIES, Family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_vllm_samples_what_the_table_says(family: Family) -> None:
    kind = transformers.AutoModelForCausalLM
    if "text_config" in family.settings:
        kind = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        architecture = type(kind.from_config(family.config)).__name__
    assert (architecture in ModelRegistry.get_supported_archs()) == (family.vllm != "none")
    if family.vllm == "none":
        return
    try:
        model = ModelRegistry.models[architecture].load_model_cls()
    except ModuleNotFoundError as error:
        pytest.skip(f"{architecture} does not load here: {error}")
    assert supports_lora(model) == (family.vllm == "adapters")
