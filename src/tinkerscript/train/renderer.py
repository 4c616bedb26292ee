"""The chat format of what is rendered in the trainer's process, by the name of tinker_cookbook's renderer.

Of supervised chats, and of episodes in this process. Elsewhere the server renders, by the model's template.
"""

from __future__ import annotations

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.renderers import Renderer, get_renderer
from transformers import AutoTokenizer

from tinkerscript.config import EngineConfig
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import model_folder


def model_renderer(config: EngineConfig) -> Renderer:
    """Over the tokenizer of `engine.model`. Raises ConfigError for a name that is not known."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model), local_files_only=True)
    try:
        return get_renderer(config.renderer, tokenizer)
    except (TinkerCookbookError, ValueError) as error:
        raise ConfigError(f"engine.renderer: {config.renderer!r}: {error}") from error
