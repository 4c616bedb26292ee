"""`tinkerscript merge`: a LoRA adapter and its base as one plain Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from tinkerscript.engine.lora import merged
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import copy_tokenizer


def merge_checkpoint(checkpoint: Path, target: Path) -> None:
    """Write the model of `checkpoint` to `target`. Raises ConfigError if that exists, and EngineError."""
    if target.exists():
        raise ConfigError(f"{target} exists already; name a new folder")
    model = merged(checkpoint)
    model.save_pretrained(target)
    copy_tokenizer(checkpoint, target)
