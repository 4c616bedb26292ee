"""Small random models of the families that people train: what the engine can do with each of them.

`scripts/write_families.py` makes the table of docs/models.md from what `examine` finds, and
`tests/unit/engine/test_families.py` holds every family to it.
"""

from __future__ import annotations

from typing import Any

CONTEXT = 256

SHAPE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": 1},
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
HEADS: dict[str, Any] = {"head_dim": 8, **GROUPED}
WINDOW: dict[str, Any] = {"sliding_window": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, **EXPERTS, "n_group": 1},
    **{"topk_group": 1, "first_k_dense_replace": 1},
}
LINEAR: dict[str, Any] = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", GROUPED),
    "Qwen 2": ("Qwen2", GROUPED),
    "Qwen 3": ("Qwen3", HEADS),
    "Mistral": ("Mistral", {"sliding_window": None, **GROUPED}),
    "Mistral with a window": ("Mistral", {**WINDOW, **GROUPED}),
    "Ministral": ("Ministral", {**MIXED, **HEADS}),
    "Ministral 3": ("Ministral3", {**HEADS}),
    "GPT-2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "GPT-NeoX (Pythia)": ("GPTNeoX", {}),
    "Gemma": ("Gemma", HEADS),
    "Gemma 2": ("Gemma2", {**MIXED, **HEADS}),
    "Gemma 3 (text)": ("Gemma3Text", {**MIXED, **HEADS}),
    "Gemma 3 with a vision tower": ("Gemma3", {"text_config": {**SHAPE, **MIXED, **HEADS}}),
    "Gemma 4 (text)": ("Gemma4Text", {**MIXED, **HEADS, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "Phi": ("Phi", {}),
    "Phi 3": ("Phi3", {"pad_token_id": 0, **GROUPED}),
    "Phi 3 with a window": ("Phi3", {"pad_token_id": 0, **WINDOW, **GROUPED}),
    "OLMo 2": ("Olmo2", GROUPED),
    "OLMo 3": ("Olmo3", {**MIXED, **GROUPED}),
    "SmolLM 3": ("SmolLM3", {"pad_token_id": 0, **GROUPED}),
    "GLM": ("Glm", HEADS),
    "GLM 4": ("Glm4", HEADS),
    "Granite": ("Granite", GROUPED),
    "Cohere (Command R)": ("Cohere", GROUPED),
    "Cohere 2": ("Cohere2", {**MIXED, **GROUPED}),
    "EXAONE 4": ("Exaone4", {**MIXED, **GROUPED}),
    "StarCoder 2": ("Starcoder2", {**GROUPED, **WINDOW}),
    "StableLM": ("StableLm", GROUPED),
    "Nemotron": ("Nemotron", GROUPED),
    "Helium": ("Helium", HEADS),
    "Apertus": ("Apertus", GROUPED),
    "Seed-OSS": ("SeedOss", HEADS),
    "Hunyuan": ("HunYuanDenseV1", HEADS),
    "ERNIE 4.5": ("Ernie4_5", HEADS),
    "Arcee": ("Arcee", GROUPED),
    "nanochat": ("NanoChat", GROUPED),
    "Qwen 2 MoE": ("Qwen2Moe", {**GROUPED, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "Qwen 3 MoE": ("Qwen3Moe", {**HEADS, **EXPERTS, "num_experts": 4}),
    "Mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "Phi 3.5 MoE": ("Phimoe", {**GROUPED, "num_local_experts": 4}),
    "OLMoE": ("Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "GLM 4 MoE": ("Glm4Moe", {**HEADS, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "MiniMax M2": ("MiniMaxM2", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {**MIXED, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek V2": ("DeepseekV2", LATENT),
    "DeepSeek V3, Kimi K2": ("DeepseekV3", LATENT),
    "GLM 4.7 Flash": ("Glm4MoeLite", LATENT),
    "Qwen 3 Next": ("Qwen3Next", {**HEADS, **LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "Qwen 3.5": ("Qwen3_5Text", {**HEADS, **LINEAR}),
    "Qwen 3.5 with a vision tower": ("Qwen3_5", {"text_config": {**SHAPE, **HEADS, **LINEAR}}),
    "Qwen 3.5 MoE": ("Qwen3_5MoeText", {**HEADS, **LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "LFM 2": ("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "Falcon H1": ("FalconH1", {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}),
    "Granite 4 (hybrid)": ("GraniteMoeHybrid", {**GROUPED, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "shared_intermediate_size": 48, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_chunk_size": 16}),
    "Llama 4 (text)": ("Llama4Text", {**HEADS, "attention_chunk_size": 16, "num_local_experts": 4, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"]}),
    "Nemotron H": ("NemotronH", {**HEADS, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "hybrid_override_pattern": "M*"}),
    "Bamba": ("Bamba", {**GROUPED, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1], "mamba_chunk_size": 16}),
    "Jamba": ("Jamba", {**GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "expert_layer_period": 2, "expert_layer_offset": 1}),
    "OLMo hybrid": ("OlmoHybrid", {**HEADS, **LINEAR}),
    "MPT (ALiBi)": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}),
}
