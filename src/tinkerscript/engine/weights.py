"""Weights on disk: loading models and adapters, and writing checkpoints.

Checkpoints are Hugging Face folders with the tokenizer and perhaps the optimizer's state. They are renamed
when complete, so none is partial.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from tinkerscript.engine.image_features import embed_images, takes_images
from tinkerscript.engine.products import speed_up
from tinkerscript.engine.quantization import Quantization, quantize
from tinkerscript.errors import EngineError, EngineRequestError
from tinkerscript.model_folder import ADAPTER_CONFIG, IMAGE_MODEL_TYPES, copy_tokenizer

OPTIMIZER_FILE = "optimizer.pt"

_IDENTITY = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
"""Equal in models with interchangeable weights."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int
    alpha: float = 32.0
    targets: tuple[str, ...] = ("attn", "mlp", "unembed")
    """Kinds of modules, or linear modules by path or last name (`q_proj`)."""

    seed: int = 0
    """For the initial A; B starts at 0."""


def load_model(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    quantization: Quantization = "none",
) -> PreTrainedModel:
    """Load a causal language model, without dropout, from a local folder only.

    `dtype`: `auto` keeps the files'. Raises EngineError, also for a LoRA adapter.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise EngineError(
            f"{folder} holds a LoRA adapter, but full weights are needed here; "
            f"merge them with: tinkerscript merge {folder} TARGET"
        )
    transformers_logging.disable_progress_bar()
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        # `sdpa`'s fused kernels ignore a soft cap (Gemma 2).
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        kind: Any = AutoModelForCausalLM
        if config.model_type in IMAGE_MODEL_TYPES:
            kind = AutoModelForImageTextToText
        model: Any = kind.from_pretrained(
            folder, local_files_only=True, dtype=dtype, attn_implementation="eager" if capped else None
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(f"cannot load a causal language model from {folder}: {error}") from error
    if quantization != "none":
        quantize(model, quantization, torch.device(device))
    if torch.device(device).type == "cpu":
        speed_up(model)
    if takes_images(model):
        embed_images(model)
    return model.to(device).eval()


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's inputs for backward, which recomputes the rest.

    Hugging Face's implementation needs training mode, with dropout.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(
            f"engine.activation_checkpointing: {model.config.model_type} has no layers that can be "
            "recomputed; set it to false"
        )
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **given)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **given)


def load_same_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    other = load_model(folder, device=str(model.device))
    mine, theirs = model.config.get_text_config(), other.config.get_text_config()
    differing = [name for name in _IDENTITY if getattr(mine, name, None) != getattr(theirs, name, None)]
    if not differing and {k: v.shape for k, v in model.state_dict().items()} != {
        k: v.shape for k, v in other.state_dict().items()
    }:
        differing = ["the shapes of weights"]
    if differing:
        raise EngineError(f"the checkpoint {folder} belongs to another model: {', '.join(differing)} differ")
    return other


def save_checkpoint(
    write: Callable[[Path], None],
    tokenizer_folder: Path,
    target: Path,
    *,
    optimizer: dict[str, Any] | None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Replace `target`. `write` writes the weights."""
    staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        write(staging)
        copy_tokenizer(tokenizer_folder, staging)
        if optimizer is not None:
            with (staging / OPTIMIZER_FILE).open("wb") as file:  # Unlike torch.save, open says why it fails.
                torch.save(optimizer, file)
        for name, text in (notes or {}).items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_text(text, encoding="utf-8")
    except BaseException:  # On a full disk, the draft would take the remaining space.
        shutil.rmtree(staging, ignore_errors=True)
        raise
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load_optimizer_state(folder: Path) -> dict[str, Any]:
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise EngineRequestError(
            f"the checkpoint {folder} has no {OPTIMIZER_FILE}: it was saved for sampling only"
        )
    return torch.load(path, map_location="cpu", weights_only=True)
