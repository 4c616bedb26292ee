"""Which architectures the engine takes; sampling and shared prefixes against the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine_helpers import family_model, own_logprobs, saved
from small_models import small_config, small_model
from tinkerscript.engine.context import exact_context, short_context
from tinkerscript.engine.decoder import decoder_for
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.packing import shares_prefixes
from tinkerscript.errors import EngineError
from tinkerscript.model_folder import TINY_MODEL

LOCAL: dict[str, Any] = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
"""GPT-Neo's names."""

LONG_ROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096},
    **{"short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
}


@pytest.mark.parametrize(
    ("name", "is_fused", "shares"),
    [
        ("Qwen 3", True, True),
        ("Qwen 2", True, True),
        ("Llama", True, True),
        ("GPT-2", False, True),
        ("Gemma", False, True),
        ("Gemma 3 (text)", False, True),
        ("MPT (ALiBi)", False, False),
    ],
)
def test_what_is_sampled_has_the_logprobs_of_a_plain_forward_pass(
    name: str, is_fused: bool, shares: bool, random_model: Path, tmp_path: Path
) -> None:
    """`tests/acceptance/test_families.py` has more models, and compares with the trainer."""
    model = family_model(name)
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14]]
    with EmbeddedEngine(saved(model, tmp_path, random_model), checkpoint_dir=tmp_path / "none") as engine:
        assert (engine.is_fused, engine.shares_prefixes) == (is_fused, shares)
        said = "mpt: training computes a shared prompt again for each sequence"
        assert shares or engine.warnings[0].startswith(said)
        client = engine.create_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=30, stop=[])
        futures = [client.sample(tinker.ModelInput.from_ints(prompt), 2, params) for prompt in prompts]
        answers = [future.result().sequences for future in futures]
    for prompt, sequences in zip(prompts, answers, strict=True):
        for sequence in sequences:
            expected = own_logprobs(model, prompt + sequence.tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}),
        ("Mamba", {}),
        # Windows that are made with the model: no proof can narrow them.
        ("GPTNeo", {**LOCAL, "window_size": 20}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_decoded_exactly_is_refused_by_name(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    model = small_model(name, **settings).to(dtype)
    for weight in model.parameters():  # So that attention is not uniform.
        weight.data *= 4 if weight.dim() > 1 else 1
    with pytest.raises(EngineError, match=rf"'{model.config.model_type}' cannot be decoded exactly"):
        decoder_for(model, frozen=True)
    assert not shares_prefixes(model)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mistral", {"sliding_window": 16}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ],
)
def test_a_window_or_a_dynamic_rotary_embedding_leaves_the_context_whole(
    name: str, settings: dict[str, Any]
) -> None:
    assert exact_context(small_config(name, **settings)) == 64


@pytest.mark.parametrize(
    "config", [transformers.GptOssConfig(), transformers.Qwen3Config(max_position_embeddings=40960)]
)
def test_a_context_far_below_the_models_own_is_said(config: PretrainedConfig) -> None:
    assert short_context(config) is None
    said = short_context(transformers.Phi3Config(max_position_embeddings=131072, rope_parameters=LONG_ROPE))
    assert said is not None
    assert "hold 4,096 tokens here, of this model's 131,072: " in said
    assert "For longer conversations choose a model" in said


def test_a_soft_cap_of_attention_is_computed(random_model: Path, tmp_path: Path) -> None:
    """Gemma 2's: fused kernels leave it out, and then trainer and sampler agree on another model."""
    settings = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 48, "query_pre_attn_scalar": 8}
    model = small_model("Gemma2", **settings)
    for layer in model.model.layers:  # Scores of attention reach the cap, which is 50.
        layer.self_attn.q_proj.weight.data *= 40
        layer.self_attn.k_proj.weight.data *= 40
    saved(model, tmp_path, random_model)
    ids = torch.randint(64, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = own_logprobs(
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval(), ids
    )
    with EmbeddedEngine(tmp_path, checkpoint_dir=tmp_path / "none") as engine:
        assert engine.shares_prefixes
        client = engine.create_sampling_client().result()
        found = client.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()
    np.testing.assert_allclose(np.array(found[1:], np.float32), expected, atol=1e-5)


def test_a_config_without_a_context_length_is_refused() -> None:
    with pytest.raises(EngineError, match="'mamba' has no context length"):
        exact_context(transformers.MambaConfig())


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:0,cuda:1"])
def test_a_device_that_is_not_there_is_one_line(device: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"engine.device: '{device}' cannot be used with torch") as refused:
        EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path, device=device)
    assert "\n" not in str(refused.value)
