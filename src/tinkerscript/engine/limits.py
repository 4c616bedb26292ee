"""How many tokens a model takes before its attention is no longer that of every token to all before it.

Up to a sliding window's width, a model that slides computes full causal attention, so it is exact up to
there; likewise up to the length at which a rotary embedding changes with the text's length.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tinkerscript.errors import EngineError

WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
"""Names by which Hugging Face's configs have the width of local attention."""

LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def exact_context(config: PreTrainedConfig) -> int:
    """Tokens of prompt and response together, at most. Raises EngineError if the config names no length."""
    settings: Any = config.get_text_config()
    lengths = [value for name in LENGTHS if isinstance(value := getattr(settings, name, None), int)]
    if not lengths:
        raise EngineError(f"the config of model type {config.model_type!r} names no context length")
    limits = [lengths[0]]
    if _is_local(settings):
        limits += [value for name in WINDOWS if isinstance(value := getattr(settings, name, None), int)]
    rope: dict[str, Any] = getattr(settings, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        limits.append(int(rope.get("original_max_position_embeddings") or lengths[0]))
    return min(limits)


def _is_local(settings: Any) -> bool:
    """Whether a layer attends to a part of the text alone; without a list of layers, whether any may."""
    kinds: list[str] | None = getattr(settings, "layer_types", None) or getattr(
        settings, "attention_layers", None
    )
    return kinds is None or any(kind not in ("full_attention", "global") for kind in kinds)
