"""The renderer for supervised chats and for episodes in the trainer's process, by tinker_cookbook's name.

For all other episodes the server renders, with the model's own chat template.
"""

from __future__ import annotations

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.renderers import Renderer, get_renderer
from transformers import AutoTokenizer

from tinkerscript.config import EngineConfig
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import model_folder


def model_renderer(config: EngineConfig) -> Renderer:
    """`engine.renderer` with the tokenizer of `engine.model`. Raises ConfigError for an unknown name."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model), local_files_only=True)
    try:
        return get_renderer(config.renderer, tokenizer)
    except (TinkerCookbookError, ValueError) as error:
        raise ConfigError(f"engine.renderer: {config.renderer!r}: {error}") from error
