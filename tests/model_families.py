"""Small random models of the families that people train: what the engine can do with each of them.

`scripts/write_families.py` makes the table of docs/models.md from what `examine` finds, and
`tests/acceptance/test_families.py` holds every family to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from tinkerscript.engine.layer_kinds import LayerKinds
from tinkerscript.engine.routing import experts_of

CONTEXT = 256

SHAPE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": 1},
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SHAPE}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
HEADS: dict[str, Any] = {"head_dim": 8, **GROUPED}
WINDOW: dict[str, Any] = {"sliding_window": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED_EXPERTS: dict[str, Any] = {
    **{**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, **ROUTED_EXPERTS},
}
LINEAR: dict[str, Any] = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}

TOWER: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_TOWER: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    **{"deepstack_visual_indexes": []},
}


SHARED_EXPERT: dict[str, Any] = {"num_experts": 4, "shared_expert_intermediate_size": 16}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 16, **GROUPED},
}

GEMMA4: dict[str, Any] = {
    **{"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, **MIXED, **HEADS},
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
GRANITE4: dict[str, Any] = {
    **{**MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48},
    **{"num_local_experts": 0, "num_experts_per_tok": 0},
}
JAMBA: dict[str, Any] = {
    **{**GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    **{"use_mamba_kernels": False, "expert_layer_period": 2, "expert_layer_offset": 1},
}
LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, **GROUPED}
LLAMA4: dict[str, Any] = {
    **{**HEADS, "attention_chunk_size": 16, "num_local_experts": 4, "intermediate_size_mlp": 48},
    "layer_types": ["chunked_attention", "full_attention"],
}
MPT: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}
NEMOTRON_H: dict[str, Any] = {
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
    **{"hybrid_override_pattern": "M*", **HEADS},
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "unembed")
QWEN_SEEING: dict[str, Any] = {"text_config": {**SHAPE, **HEADS, **LINEAR}, "vision_config": QWEN_TOWER}


def seeing(text: dict[str, Any]) -> dict[str, Any]:
    """The settings of a language model with a vision tower."""
    return {"text_config": text, "vision_config": TOWER}


@dataclass(frozen=True)
class Family:
    """A family, and what the engine is held to with it."""

    name: str
    architecture: str
    """Its config is transformers' `<architecture>Config`."""

    settings: dict[str, Any]
    is_fused: bool = False
    shares: bool = True
    """Whether training computes a shared prefix once."""

    targets: tuple[str, ...] = ("attn", "mlp", "unembed")
    """Of a LoRA."""

    replays: bool = True
    """Whether training can replay what routers chose, if it is a mixture of experts."""

    vllm: str = "adapters"
    """What vLLM's registry says that it samples: `adapters`, only `all weights`, or `none`."""

    scale: float = 4
    """Of its random weights, so large that attention is not uniform, and windows are felt."""

    @property
    def config(self) -> transformers.PretrainedConfig:
        named = self.settings if "text_config" in self.settings else SHAPE | self.settings
        return getattr(transformers, f"{self.architecture}Config")(**named)

    @property
    def is_mixture(self) -> bool:
        return experts_of(self.config) > 0

    @property
    def kinds(self) -> LayerKinds:
        return LayerKinds.of(self.config)


FAMILIES = [
    Family("Llama", "Llama", GROUPED, is_fused=True),
    Family("Qwen 2", "Qwen2", GROUPED, is_fused=True),
    Family("Qwen 3", "Qwen3", HEADS, is_fused=True),
    Family("Mistral", "Mistral", {"sliding_window": None, **GROUPED}, is_fused=True),
    Family("Mistral with a window", "Mistral", {**WINDOW, **GROUPED}),
    Family("Ministral", "Ministral", {**MIXED, **HEADS}, vllm="none"),
    Family("Ministral 3", "Ministral3", {**HEADS}),
    Family("GPT-2", "GPT2", GPT2, vllm="all weights"),
    Family("GPT-NeoX (Pythia)", "GPTNeoX", {}),
    Family("Gemma", "Gemma", HEADS),
    Family("Gemma 2", "Gemma2", {**MIXED, **HEADS}),
    Family("Gemma 3 (text)", "Gemma3Text", {**MIXED, **HEADS}),
    Family("Gemma 3 with a vision tower", "Gemma3", seeing({**SHAPE, **MIXED, **HEADS})),
    Family("Gemma 4 (text)", "Gemma4Text", GEMMA4),
    Family("Phi", "Phi", {}),
    Family("Phi 3", "Phi3", {"pad_token_id": 0, **GROUPED}),
    Family("Phi 3 with a window", "Phi3", {"pad_token_id": 0, **WINDOW, **GROUPED}),
    Family("OLMo 2", "Olmo2", GROUPED),
    Family("OLMo 3", "Olmo3", {**MIXED, **GROUPED}),
    Family("SmolLM 3", "SmolLM3", {"pad_token_id": 0, **GROUPED}),
    Family("GLM", "Glm", HEADS),
    Family("GLM 4", "Glm4", HEADS),
    Family("Granite", "Granite", GROUPED),
    Family("Cohere (Command R)", "Cohere", GROUPED),
    Family("Cohere 2", "Cohere2", {**MIXED, **GROUPED}),
    Family("EXAONE 4", "Exaone4", {**MIXED, **GROUPED}),
    Family("StarCoder 2", "Starcoder2", {**GROUPED, **WINDOW}),
    Family("StableLM", "StableLm", GROUPED, vllm="all weights"),
    Family("Nemotron", "Nemotron", GROUPED),
    Family("Helium", "Helium", HEADS, vllm="none"),
    Family("Apertus", "Apertus", GROUPED),
    Family("Seed-OSS", "SeedOss", HEADS),
    Family("Hunyuan", "HunYuanDenseV1", HEADS),
    Family("ERNIE 4.5", "Ernie4_5", HEADS),
    Family("Arcee", "Arcee", GROUPED),
    Family("nanochat", "NanoChat", GROUPED, vllm="none"),
    Family("Qwen 2 MoE", "Qwen2Moe", {**GROUPED, **EXPERTS, **SHARED_EXPERT}),
    Family("Qwen 3 MoE", "Qwen3Moe", {**HEADS, **EXPERTS, "num_experts": 4}),
    Family("Mixtral", "Mixtral", {**GROUPED, **LOCAL_EXPERTS}),
    Family("Phi 3.5 MoE", "Phimoe", {**GROUPED, **LOCAL_EXPERTS}, replays=False, vllm="none"),
    Family("OLMoE", "Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("GLM 4 MoE", "Glm4Moe", {**HEADS, **ROUTED_EXPERTS}),
    Family("MiniMax M2", "MiniMaxM2", {**HEADS, **LOCAL_EXPERTS}),
    Family("gpt-oss", "GptOss", {**MIXED, **HEADS, **LOCAL_EXPERTS}),
    Family("Idefics3", "Idefics3", seeing({**LLAMA, **GROUPED})),
    Family("SmolVLM", "SmolVLM", seeing({**LLAMA, **GROUPED})),
    Family("DeepSeek V2", "DeepseekV2", LATENT),
    Family("DeepSeek V3, Kimi K2", "DeepseekV3", LATENT),
    Family("GLM 4.7 Flash", "Glm4MoeLite", LATENT),
    Family("Qwen 3 Next", "Qwen3Next", {**HEADS, **LINEAR, **EXPERTS, **SHARED_EXPERT}, shares=False),
    Family("Qwen 3.5", "Qwen3_5Text", {**HEADS, **LINEAR}, shares=False),
    Family("Qwen 3.5 with a vision tower", "Qwen3_5", QWEN_SEEING, shares=False),
    Family("Qwen 3.5 MoE", "Qwen3_5MoeText", {**HEADS, **LINEAR, **EXPERTS, **SHARED_EXPERT}, shares=False),
    Family("LFM 2", "Lfm2", LFM2, shares=False),
    Family("Falcon H1", "FalconH1", {**MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4}, shares=False),
    Family("Granite 4 (hybrid)", "GraniteMoeHybrid", GRANITE4, shares=False),
    Family("Llama 4 (text)", "Llama4Text", LLAMA4),
    Family("Nemotron H", "NemotronH", NEMOTRON_H, shares=False, targets=PROJECTIONS, replays=False, scale=1),
    Family("Bamba", "Bamba", {**MAMBA, "attn_layer_indices": [1]}, shares=False, vllm="none"),
    Family("Jamba", "Jamba", JAMBA, shares=False),
    Family("MPT (ALiBi)", "Mpt", MPT, shares=False, vllm="none"),
]
