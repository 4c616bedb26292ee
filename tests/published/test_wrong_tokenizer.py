"""A model's folder whose tokenizer_config.json names another class than its tokenizer.json is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tinkerscript.errors import ConfigError
from tinkerscript.train.tokenizer_check import check_loads_the_same


def with_class(name: str | None, smollm2: Path, folder: Path) -> Path:
    """The model's folder, without weights, whose tokenizer is of another class."""
    for path in smollm2.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("tokenizer_class")
    named = {} if name is None else {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    return folder


@pytest.mark.parametrize("name", ["LlamaTokenizer", None])
def test_another_class_is_refused_with_the_remedy(name: str | None, smollm2: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(ConfigError, match='set "tokenizer_class": "PreTrainedTokenizerFast"'):
        check_loads_the_same(with_class(name, smollm2, tmp_path), notes.append)
    assert notes == []


def test_the_model_as_it_was_published_passes(smollm2: Path) -> None:
    notes: list[str] = []
    check_loads_the_same(smollm2, notes.append)
    assert notes == []
