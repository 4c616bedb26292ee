"""What a model's folder says: read from its files, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import (
    TINY_MODEL,
    context_of,
    copy_tokenizer,
    eos_token_of,
    model_folder,
    stop_ids_of,
    vocabulary_of,
)


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_tiny_model_and_folders(tmp_path: Path) -> None:
    assert model_folder("tiny") == TINY_MODEL
    with pytest.raises(ConfigError, match=r"has no config\.json; give 'tiny' or the folder"):
        model_folder(str(tmp_path))


def test_limits_are_read_of_text_models_inside_others_too(tmp_path: Path) -> None:
    write(tmp_path, config={"text_config": {"max_position_embeddings": 77, "vocab_size": 11}})
    assert (context_of(tmp_path), vocabulary_of(tmp_path)) == (77, 11)
    write(tmp_path, config={})
    with pytest.raises(ConfigError, match="has no max_position_embeddings"):
        context_of(tmp_path)
    with pytest.raises(ConfigError, match="has no vocab_size"):
        vocabulary_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        context_of(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: there is no such file"):
        context_of(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({}, {}, set()),
        ({}, {"eos_token_id": 3}, {3}),
        ({"eos_token_id": [0, 5]}, {"eos_token_id": 3}, {0, 5}),
    ],
)
def test_generation_stops_where_its_config_says_first(
    tmp_path: Path, generation: object, config: object, ids: set[int]
) -> None:
    assert stop_ids_of(write(tmp_path, config=config, generation_config=generation)) == ids


def test_the_end_of_text_is_the_tokenizers_text_else_the_models_id(tmp_path: Path) -> None:
    assert eos_token_of(tmp_path) is None
    assert eos_token_of(write(tmp_path, config={"eos_token_id": [7, 8]})) == 7
    assert eos_token_of(write(tmp_path, tokenizer_config={"eos_token": {"content": "<end>"}})) == "<end>"


def test_a_tokenizer_is_copied_without_weights(tmp_path: Path) -> None:
    copy_tokenizer(TINY_MODEL, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
