"""Checkpoints: Hugging Face folders with the tokenizer and, where training goes on, the optimizer's state.

Invariant: a checkpoint is written to a sibling folder and renamed into place, so a folder that exists is
complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tinkerscript.errors import EngineError, EngineRequestError
from tinkerscript.model_folder import copy_tokenizer

OPTIMIZER_FILE = "optimizer.pt"


def load_model(folder: Path, *, device: str = "cpu") -> PreTrainedModel:
    """A causal language model from a local folder, in float32, without dropout; never from a hub.

    Raises EngineError naming the folder if it cannot be loaded.
    """
    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"cannot load a causal language model from {folder}: {error}") from error
    return model.to(device).eval()


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer_folder: Path,
    target: Path,
    *,
    optimizer: dict[str, Any] | None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write the model, its tokenizer and, if given, the optimizer state to `target`, replacing what is there.

    `notes`: small text files to put beside them, by name.
    """
    staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    model.save_pretrained(staging)
    copy_tokenizer(tokenizer_folder, staging)
    if optimizer is not None:
        torch.save(optimizer, staging / OPTIMIZER_FILE)
    for name, text in (notes or {}).items():
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_text(text, encoding="utf-8")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of a checkpoint into `model`; raises EngineError if shapes or names differ."""
    other = load_model(folder, device=str(model.device))
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as error:
        raise EngineError(f"the checkpoint {folder} is of another model: {error}") from error


def load_optimizer_state(folder: Path) -> dict[str, Any]:
    """The optimizer state of a checkpoint; raises EngineRequestError if it was saved without one."""
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise EngineRequestError(
            f"the checkpoint {folder} has no {OPTIMIZER_FILE}: it was saved for sampling only"
        )
    return torch.load(path, weights_only=True)
