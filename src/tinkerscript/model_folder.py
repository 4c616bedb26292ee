"""What a model's folder says, read from its JSON files: no weights, no torch, no transformers.

A model's folder is Hugging Face's: `config.json` and `tokenizer.json`, and where they exist
`generation_config.json`, `tokenizer_config.json`, a chat template and weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tinkerscript.errors import ConfigError

TINY_MODEL = Path(__file__).parent / "engine" / "tiny"
"""The model that ships with the package."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What a tokenizer and its chat template may consist of."""


def model_folder(model: str) -> Path:
    """The folder of `model`: `tiny`, or a path. Raises ConfigError for one without config or tokenizer."""
    folder = TINY_MODEL if model == "tiny" else Path(model).expanduser()
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"engine.model: {model!r} has no {name}; "
                "give 'tiny' or the folder of a Hugging Face causal model"
            )
    return folder


def context_of(folder: Path) -> int:
    """The context length: tokens of prompt and reply together. Raises ConfigError if it is not declared."""
    limit = text_config(folder).get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{folder / 'config.json'} has no max_position_embeddings, the context length")
    return limit


def vocabulary_of(folder: Path) -> int:
    """How many ids the model has, which may be more than its tokenizer has. Raises ConfigError."""
    size = text_config(folder).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{folder / 'config.json'} has no vocab_size, the number of token ids")
    return size


def stop_ids_of(folder: Path) -> frozenset[int]:
    """The ids at which generation stops: generation_config.json's, else config.json's; empty for none."""
    declared = read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = text_config(folder).get("eos_token_id")
    return frozenset([declared] if isinstance(declared, int) else declared or ())


def eos_token_of(folder: Path) -> str | int | None:
    """The end-of-text token: its text by tokenizer_config.json, else its id by config.json, else None."""
    token: Any = read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    declared: Any = read_json(folder / "config.json").get("eos_token_id")
    if isinstance(declared, list) and declared:
        declared = declared[0]
    return declared if isinstance(declared, int) else None


def text_config(folder: Path) -> dict[str, Any]:
    """config.json, or its part about text. Raises ConfigError if it cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: there is no such file")
    config = read_json(path)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file. Raises ConfigError for other content."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy those of `TOKENIZER_FILES` that `source` has."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
