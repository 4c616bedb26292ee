"""Read a model's folder without weights, torch or transformers.

It has Hugging Face's layout, or holds a LoRA adapter with PEFT's `adapter_config.json`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tinkerscript.errors import ConfigError
from tinkerscript.remote_folder import fetched_checkpoint, is_url

TINY_MODEL = Path(__file__).parent / "engine" / "tiny"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
)
IMAGE_MODEL_TYPES = frozenset({"idefics3", "smolvlm"})
"""Others with a vision tower take text here."""

ADAPTER_CONFIG = "adapter_config.json"

_CONFIG_FILES = ("config.json", "generation_config.json")

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")

# Some models lack safetensors.
_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")

# The second is GPT-2's, the third MPT's.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")

_COMMIT = re.compile(r"[0-9a-f]{40}")

logger = logging.getLogger(__name__)


def model_folder(model: str, *, weights: bool = False, note: Callable[[str], None] = logger.info) -> Path:
    """Return the folder of `model`: `tiny`, a path, a URL, or a Hugging Face id.

    A path names a folder or a GGUF file, a URL a run's checkpoint. An id is `Qwen/Qwen3-8B` or
    `Qwen/Qwen3-8B@REVISION`; a local folder of that name comes first. Only the needed files are fetched.
    HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN apply. `note` announces a download once per process.
    """
    if is_url(model):
        model = str(fetched_checkpoint(model, note=note))
    local = TINY_MODEL if model == "tiny" else Path(model).expanduser()
    hub = None if model == "tiny" or local.exists() else _HUB_ID.fullmatch(model)
    folder = _fetched(hub[1], hub[2], weights, note) if hub else _local(local, model, note)
    place = f"{model!r} in the Hugging Face Hub" if hub else repr(model)
    for name in ("config.json", "tokenizer.json"):
        if name == "config.json" and base_of_adapter(folder, note=note):
            continue
        if not (folder / name).is_file():
            raise ConfigError(
                f"engine.model: {place} has no {name}; give 'tiny', the folder of a Hugging Face causal "
                "model, or the id of one in the Hugging Face Hub, such as Qwen/Qwen3-8B"
            )
    return folder


def _local(folder: Path, model: str, note: Callable[[str], None]) -> Path:
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        try:
            from tinkerscript.gguf_file import folder_of_gguf  # It needs torch, which servers lack.
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"engine.model: reading {model!r} needs {error.name}; run pip install 'tinkerscript[engine]'"
            ) from error
        return folder_of_gguf(folder, note=note)
    what = "is a file" if folder.exists() else "does not exist"
    raise ConfigError(
        f"engine.model: {model!r} {what}; give 'tiny', the folder of a Hugging Face causal model "
        "(config.json, tokenizer.json, weights), a .gguf file, or the id of a model in the Hugging Face Hub, "
        "such as Qwen/Qwen3-8B"
    )


def pinned_model(model: str, *, note: Callable[[str], None] = logger.info) -> str:
    """Pin a hub id to its commit, and a file to its folder, so that all processes use the same files."""
    folder = model_folder(model, note=note)
    hub_id = hub_id_of(folder)
    if Path(model).expanduser().is_file():
        return str(folder)
    return f"{hub_id}@{folder.name}" if hub_id and not Path(model).expanduser().exists() else model


def same_model(one: str, other: str) -> bool:
    """A name without a commit matches any commit."""
    names = {one.partition("@")[0], other.partition("@")[0]}
    return one == other or (len(names) == 1 and names <= {one, other})


def hub_id_of(folder: Path) -> str | None:
    """Return the id of `models--OWNER--NAME/snapshots/COMMIT` in the hub's cache."""
    owner, separator, name = folder.parent.parent.name.removeprefix("models--").partition("--")
    in_cache = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return f"{owner}/{name}" if in_cache and separator else None


def base_of_folder(folder: Path) -> tuple[str, str | None]:
    """Return an adapter's base: a hub id and the commit, or a path."""
    hub_id = hub_id_of(folder)
    return (str(folder.absolute()), None) if hub_id is None else (hub_id, folder.name)


def base_of_adapter(folder: Path, *, note: Callable[[str], None] = logger.info) -> Path | None:
    """Return an adapter's base folder, with weights, or None if `folder` is no adapter."""
    config = read_json(folder / ADAPTER_CONFIG)
    if not config:
        return None
    base, revision = str(config.get("base_model_name_or_path", "")), config.get("revision")
    try:
        in_hub = revision and not Path(base).exists()
        return model_folder(f"{base}@{revision}" if in_hub else base, weights=True, note=note)
    except ConfigError as error:
        raise ConfigError(f"the base of the LoRA adapter in {folder} cannot be used: {error}") from error


def model_name(folder: Path) -> str:
    return hub_id_of(folder) or folder.name


# Keys: id, revision, and whether with weights.
_snapshots: dict[tuple[str, str | None, bool], Path] = {}


def _fetched(hub_id: str, revision: str | None, weights: bool, note: Callable[[str], None]) -> Path:
    if (folder := _snapshots.get((hub_id, revision, weights))) is not None:
        return folder
    more = _WEIGHTS if weights else ()
    if revision and _COMMIT.fullmatch(revision):
        with suppress(ConfigError):
            folder = _snapshot(hub_id, revision, more, cached=True)
            if not weights or _has_weights(folder):
                return folder
    note(f"asking the Hugging Face Hub for {hub_id}, and fetching what is not in its cache")
    folder = _snapshot(hub_id, revision, more)
    if weights and not _has_weights(folder):
        folder = _snapshot(hub_id, revision, _OLD_WEIGHTS)
    if weights and not _has_weights(folder):
        raise ConfigError(f"engine.model: {hub_id!r} in the Hugging Face Hub has no weights")
    _snapshots[hub_id, revision, weights] = folder
    return folder


def _has_weights(folder: Path) -> bool:
    return any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir())


def _snapshot(hub_id: str, revision: str | None, more: tuple[str, ...], *, cached: bool = False) -> Path:
    # `cached` asks only the cache.
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            IncompleteSnapshotError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ConfigError(
            f"engine.model: {hub_id!r} is not a folder, and models of the Hugging Face Hub need "
            "huggingface_hub; run pip install 'tinkerscript[server]'"
        ) from error
    name, hub = f"engine.model: {hub_id!r}", f"the Hugging Face Hub ({constants.ENDPOINT})"
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=[*_CONFIG_FILES, *TOKENIZER_FILES, *more],
                local_files_only=cached,
            )
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{hub_id}, and set HF_TOKEN to a "
            "token of your account (or run `hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} in {hub}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name} is neither a folder nor a model of {hub}; if it is private, set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, IncompleteSnapshotError, ConnectionError, httpx.TransportError) as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{hub} cannot be reached: {_cause(error)}"
        raise ConfigError(
            f"{name} is neither a folder nor completely in the cache {constants.HF_HUB_CACHE}, and {why}"
        ) from error
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ConfigError(f"{name} cannot be fetched from {hub}: {error}") from error


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0] or type(error).__name__


def context_of(folder: Path) -> int:
    """Return the maximum tokens of prompt and reply."""
    config = text_config(folder)
    limit = next((config[name] for name in _CONTEXT_KEYS if name in config), None)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{folder / 'config.json'} has no max_position_embeddings, the context length")
    return limit


def vocabulary_of(folder: Path) -> int:
    """May exceed the tokenizer's number of ids."""
    size = text_config(folder).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{folder / 'config.json'} has no vocab_size, the number of token ids")
    return size


def stop_ids_of(folder: Path) -> frozenset[int]:
    base = base_of_adapter(folder) or folder
    declared = read_json(base / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = text_config(folder).get("eos_token_id")
    return frozenset([declared] if isinstance(declared, int) else declared or ())


def eos_token_of(folder: Path) -> str | int | None:
    """The end-of-text token's text (tokenizer_config.json) or id (config.json)."""
    token: Any = read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    declared: Any = config_of(folder).get("eos_token_id")
    if isinstance(declared, list) and declared:
        declared = declared[0]
    return declared if isinstance(declared, int) else None


def config_of(folder: Path) -> dict[str, Any]:
    """An adapter has its base's config."""
    return read_json((base_of_adapter(folder) or folder) / "config.json")


def reads_images(folder: Path) -> bool:
    return config_of(folder).get("model_type") in IMAGE_MODEL_TYPES


def text_config(folder: Path) -> dict[str, Any]:
    """The config, or its part about text."""
    path = (base_of_adapter(folder) or folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: there is no such file")
    config = read_json(path)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def read_json(path: Path) -> dict[str, Any]:
    """Return {} if the file is missing. Raises ConfigError for other content."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must contain a JSON object, not {type(data).__name__}")
    return data


def copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
