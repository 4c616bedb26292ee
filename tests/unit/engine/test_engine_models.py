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

from tinkerscript.engine.context import exact_context
from tinkerscript.engine.decoder import FusedDecoder, HubDecoder, decoder_for
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.packing import shares_prefixes
from tinkerscript.errors import EngineError
from tinkerscript.model_folder import TINY_MODEL

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
MOE: dict[str, Any] = {"num_local_experts": 4}


def config_of(name: str, **settings: Any) -> PretrainedConfig:
    """A small configuration of the class `name`."""
    return getattr(transformers, name)(**(SHAPE | settings))


def random_model_of(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


SAMPLED = {"Qwen3Config", "Qwen2Config", "LlamaConfig", "GPT2Config", "GemmaConfig", "Gemma3TextConfig"}
"""Of these, rows that decode together are compared with a plain forward pass too."""

TAKEN: list[tuple[str, dict[str, Any], type]] = [
    ("Qwen3Config", {"head_dim": 8, **GROUPED}, FusedDecoder),
    ("Qwen2Config", GROUPED, FusedDecoder),
    ("LlamaConfig", GROUPED, FusedDecoder),
    ("MistralConfig", {"sliding_window": None, **GROUPED}, FusedDecoder),
    ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, HubDecoder),
    ("GemmaConfig", {"head_dim": 8, **GROUPED}, HubDecoder),
    ("Gemma2Config", {"head_dim": 8, "sliding_window": 48, **GROUPED}, HubDecoder),
    ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 48, **GROUPED}, HubDecoder),
    ("Phi3Config", {"pad_token_id": 0, **GROUPED}, HubDecoder),
    ("Olmo2Config", GROUPED, HubDecoder),
    ("SmolLM3Config", {"pad_token_id": 0, **GROUPED}, HubDecoder),
    ("GPTNeoXConfig", {}, HubDecoder),
    ("MixtralConfig", {**GROUPED, **MOE}, HubDecoder),
    (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **GROUPED},
        HubDecoder,
    ),
    ("GptOssConfig", {"head_dim": 8, "sliding_window": 48, **GROUPED, **MOE}, HubDecoder),
]


@pytest.mark.parametrize(("name", "settings", "kind"), TAKEN, ids=[name for name, _, _ in TAKEN])
def test_an_architecture_proves_its_decoder_and_shares_prefixes(
    name: str, settings: dict[str, Any], kind: type
) -> None:
    model = random_model_of(config_of(name, **settings))
    assert decoder_for(model, frozen=True) is kind
    assert shares_prefixes(model)


@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(name, settings, id=name) for name, settings, _ in TAKEN if name in SAMPLED],
)
def test_what_is_sampled_has_the_logprobs_of_a_plain_forward_pass(
    name: str, settings: dict[str, Any], random_model: Path, tmp_path: Path
) -> None:
    model = random_model_of(config_of(name, **settings))
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
        ("BloomConfig", {"n_layer": 2, "n_head": 4}),
        ("MambaConfig", {}),
        ("MistralConfig", {"sliding_window": 4, **GROUPED}),
    ],
)
def test_what_cannot_be_decoded_exactly_is_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    model = random_model_of(config_of(name, **settings))
    with pytest.raises(EngineError, match=rf"'{model.config.model_type}' cannot be decoded exactly"):
        decoder_for(model, frozen=True)
    assert not shares_prefixes(model)


@pytest.mark.parametrize(
    ("name", "settings", "context"),
    [
        ("MistralConfig", {"sliding_window": 16}, 16),
        ("MistralConfig", {"sliding_window": None}, 64),
        ("Qwen2Config", {"sliding_window": 16, "use_sliding_window": False}, 64),
        ("Gemma3TextConfig", {"sliding_window": 48}, 48),
        ("GPTNeoConfig", {"attention_types": [[["global", "local"], 1]], "window_size": 20}, 20),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            64,
        ),
    ],
)
def test_the_context_ends_where_attention_is_no_longer_to_everything(
    name: str, settings: dict[str, Any], context: int
) -> None:
    """A layer that slides over 16 tokens is the same as one that does not, in texts of up to 16."""
    settings = settings | ({"num_layers": 2, "num_heads": 4} if name == "GPTNeoConfig" else {})
    assert exact_context(config_of(name, **settings)) == context


def test_a_config_without_a_context_length_is_refused() -> None:
    with pytest.raises(EngineError, match="'mamba' names no context length"):
        exact_context(transformers.MambaConfig())


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:0,cuda:1"])
def test_a_device_that_is_not_there_is_one_line(device: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"engine.device: '{device}' cannot be used with torch") as refused:
        EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path, device=device)
    assert "\n" not in str(refused.value)
