"""Which architectures the engine takes; sampling and shared prefixes against the model's own forward."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from small_models import small_config, small_model
from tinkerscript.engine.context import exact_context, short_context
from tinkerscript.engine.decoder import FusedDecoder, HubDecoder, decoder_for
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.packing import shares_prefixes
from tinkerscript.errors import EngineError
from tinkerscript.model_folder import TINY_MODEL

GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
MOE: dict[str, Any] = {"num_local_experts": 4}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Multi-head latent attention: keys of 16 channels, values of 8."""


LOCAL: dict[str, Any] = {
    "attention_types": [[["global", "local"], 1]],
    "num_layers": 2,
    "num_heads": 4,
}
"""GPT-Neo's names."""

LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [1.0] * 48,
}

SAMPLED = {"Qwen3", "Qwen2", "Llama", "GPT2", "Gemma", "Gemma3Text"}
"""Of these, rows that decode together are compared with a plain forward pass too."""

TAKEN: list[tuple[str, dict[str, Any], type]] = [
    ("Qwen3", {"head_dim": 8, **GROUPED}, FusedDecoder),
    ("Qwen2", GROUPED, FusedDecoder),
    ("Llama", GROUPED, FusedDecoder),
    ("Mistral", {"sliding_window": None, **GROUPED}, FusedDecoder),
    ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, HubDecoder),
    ("Gemma", {"head_dim": 8, **GROUPED}, HubDecoder),
    ("Gemma2", {"head_dim": 8, "sliding_window": 48, **GROUPED}, HubDecoder),
    ("Gemma3Text", {"head_dim": 8, "sliding_window": 48, **GROUPED}, HubDecoder),
    ("Phi3", {"pad_token_id": 0, **GROUPED}, HubDecoder),
    ("Olmo2", GROUPED, HubDecoder),
    ("SmolLM3", {"pad_token_id": 0, **GROUPED}, HubDecoder),
    ("GPTNeoX", {}, HubDecoder),
    ("Mixtral", {**GROUPED, **MOE}, HubDecoder),
    (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **GROUPED},
        HubDecoder,
    ),
    ("GptOss", {"head_dim": 8, "sliding_window": 48, **GROUPED, **MOE}, HubDecoder),
    ("DeepseekV2", LATENT, HubDecoder),
    ("DeepseekV3", LATENT, HubDecoder),
]


@pytest.mark.parametrize(("name", "settings", "kind"), TAKEN, ids=[name for name, _, _ in TAKEN])
def test_an_architecture_proves_its_decoder_and_shares_prefixes(
    name: str, settings: dict[str, Any], kind: type
) -> None:
    model = small_model(name, **settings)
    assert decoder_for(model, frozen=True) is kind
    assert shares_prefixes(model)


@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(name, settings, id=name) for name, settings, _ in TAKEN if name in SAMPLED],
)
def test_what_is_sampled_has_the_logprobs_of_a_plain_forward_pass(
    name: str, settings: dict[str, Any], random_model: Path, tmp_path: Path
) -> None:
    model = small_model(name, **settings)
    model.save_pretrained(tmp_path)
    shutil.copy(random_model / "tokenizer.json", tmp_path)
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14]]
    with EmbeddedEngine(tmp_path, checkpoint_dir=tmp_path / "none") as engine:
        client = engine.create_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=30, stop=[])
        futures = [client.sample(tinker.ModelInput.from_ints(prompt), 2, params) for prompt in prompts]
        answers = [future.result().sequences for future in futures]
    for prompt, sequences in zip(prompts, answers, strict=True):
        for sequence in sequences:
            ids = torch.tensor([prompt + sequence.tokens])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()
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
    ("name", "settings", "context"),
    [
        ("Mistral", {"sliding_window": 16}, 64),
        ("Gemma3Text", {"sliding_window": 48}, 64),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            64,
        ),
    ],
)
def test_the_context_is_the_models_own_unless_its_rotary_embedding_changes(
    name: str, settings: dict[str, Any], context: int
) -> None:
    assert exact_context(small_config(name, **settings)) == context


@pytest.mark.parametrize(
    ("config", "held"),
    [
        (transformers.Phi3Config(max_position_embeddings=131072, rope_parameters=LONG_ROPE), 4096),
        (transformers.GptOssConfig(), None),
        (transformers.Gemma3Config(text_config={"sliding_window": 1024}), None),
        (transformers.Qwen3Config(max_position_embeddings=40960), None),
    ],
)
def test_a_context_far_below_the_models_own_is_said(config: PretrainedConfig, held: int | None) -> None:
    said = short_context(config)
    if held is None:
        assert said is None
    else:
        own = config.get_text_config().max_position_embeddings
        assert said is not None
        assert f"hold {held:,} tokens here, of this model's {own:,}: " in said
        assert "For longer conversations choose a model" in said


def test_a_model_that_shares_no_prefixes_says_so(random_model: Path, tmp_path: Path) -> None:
    small_model("Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=64).save_pretrained(tmp_path)
    shutil.copy(random_model / "tokenizer.json", tmp_path)
    with EmbeddedEngine(tmp_path, checkpoint_dir=tmp_path / "none") as engine:
        (said,) = engine.warnings
    assert said.startswith("mpt: training computes a shared prompt again for each sequence")


def test_a_soft_cap_of_attention_is_computed(random_model: Path, tmp_path: Path) -> None:
    """Gemma 2's: fused kernels leave it out, and then trainer and sampler agree on another model."""
    model = small_model("Gemma2", head_dim=8, sliding_window=48, query_pre_attn_scalar=8, **GROUPED)
    for layer in model.model.layers:  # Scores of attention reach the cap, which is 50.
        layer.self_attn.q_proj.weight.data *= 40
        layer.self_attn.k_proj.weight.data *= 40
    model.save_pretrained(tmp_path)
    shutil.copy(random_model / "tokenizer.json", tmp_path)
    ids = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(0))
    capped = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = capped(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    with EmbeddedEngine(tmp_path, checkpoint_dir=tmp_path / "none") as engine:
        assert engine.shares_prefixes
        client = engine.create_sampling_client().result()
        found = client.compute_logprobs(tinker.ModelInput.from_ints(ids[0].tolist())).result()
    np.testing.assert_allclose(np.array(found[1:], np.float32), expected, atol=1e-5)


def test_a_config_without_a_context_length_is_refused() -> None:
    with pytest.raises(EngineError, match="'mamba' has no context length"):
        exact_context(transformers.MambaConfig())


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:0,cuda:1"])
def test_a_device_that_is_not_there_is_one_line(device: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"engine.device: '{device}' cannot be used with torch") as refused:
        EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path, device=device)
    assert "\n" not in str(refused.value)
