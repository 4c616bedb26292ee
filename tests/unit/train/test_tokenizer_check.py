"""Tokenizers are compared by what is in them and what they do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.train.tokenizer_check import (
    check_loads_the_same,
    check_same_tokenizer,
    check_tokenizer_of_server,
)


def changed(folder: Path, own: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the tokenizer in `own`, under another name, after `change` of its definition."""
    folder.mkdir()
    definition = json.loads((own / "tokenizer.json").read_text())
    change(definition)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def swap_two_ids(definition: dict[str, Any]) -> None:
    vocabulary = definition["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


def merge_otherwise(definition: dict[str, Any]) -> None:
    merges = definition["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def no_longer_special(definition: dict[str, Any]) -> None:
    next(token for token in definition["added_tokens"] if token["content"] == "<|im_end|>")["special"] = False


def one_token_more(definition: dict[str, Any]) -> None:
    token = dict(definition["added_tokens"][-1])
    definition["added_tokens"].append(token | {"id": token["id"] + 1, "content": "<new>"})


def another_end(definition: dict[str, Any]) -> None:
    token = next(token for token in definition["added_tokens"] if token["content"] == "<|im_end|>")
    token["content"] = "<|eot|>"


def lower_case(definition: dict[str, Any]) -> None:
    definition["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (swap_two_ids, r"id \d+ is 'A' here, and 'B' there"),
        (merge_otherwise, r"merge 0 is \['h', 'e'\] here, and \['l', 'l'\] there"),
        (
            no_longer_special,
            r"id \d+ is the special token '<\|im_end\|>' here, and the added token '<\|im_end\|>' there",
        ),
        (one_token_more, r"id \d+ is no token here, and the added token '<new>' there"),
        (
            another_end,
            r"id \d+ is the special token '<\|im_end\|>' here, and the special token '<\|eot\|>' there",
        ),
        (lower_case, r"at 'Ü.*' its id is \d+, and \d+ here"),
    ],
)
def test_the_first_difference_is_named(
    byte_model: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], difference: str
) -> None:
    other = changed(tmp_path / "other", byte_model, change)
    with pytest.raises(ConfigError, match=rf"^the judge has another tokenizer .*: {difference}; logprobs of"):
        check_same_tokenizer(byte_model, other, whose="the judge")


def test_what_does_the_same_is_the_same_whatever_its_file_looks_like(
    byte_model: Path, tmp_path: Path
) -> None:
    def padded(definition: dict[str, Any]) -> None:
        definition["padding"] = {
            **{"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None},
            **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
        }

    other = changed(tmp_path / "other", byte_model, padded)
    files = [(folder / "tokenizer.json").read_text() for folder in (byte_model, other)]
    assert files[0] != files[1]
    check_same_tokenizer(byte_model, other, whose="the judge")


async def test_a_server_is_asked_about_every_token_of_the_vocabulary() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    seen: set[int] = set()
    longest = 0

    async def encode(text: str) -> list[int]:
        nonlocal longest
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        seen.update(ids)
        longest = max(longest, len(ids))
        return ids

    await check_tokenizer_of_server(TINY_MODEL, encode, longest=256, whose="the judge")
    whole = [i for i in range(tokenizer.get_vocab_size()) if "\ufffd" not in tokenizer.decode([i], False)]
    assert len(seen & set(whole)) > 0.95 * len(whole)
    assert longest <= 256


@pytest.mark.parametrize(
    ("change", "difference"),
    [(another_end, r"at '<\|im_end\|>.*' its id is"), (merge_otherwise, "")],
)
async def test_a_server_with_another_tokenizer_is_refused_by_the_first_text(
    byte_model: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], difference: str
) -> None:
    """Behind an endpoint only ids can be seen: what gives every text the same ids cannot be told apart."""
    other = Tokenizer.from_file(str(changed(tmp_path / "other", byte_model, change) / "tokenizer.json"))

    async def encode(text: str) -> list[int]:
        return other.encode(text, add_special_tokens=False).ids

    if difference:
        with pytest.raises(ConfigError, match=rf"the judge has another tokenizer .*{difference}"):
            await check_tokenizer_of_server(byte_model, encode, longest=4096, whose="the judge")
    else:
        await check_tokenizer_of_server(byte_model, encode, longest=4096, whose="the judge")


async def test_a_server_that_says_nothing_is_refused(byte_model: Path) -> None:
    async def nothing(text: str) -> None:
        return None

    with pytest.raises(ConfigError, match="it has no /tokenize"):
        await check_tokenizer_of_server(byte_model, nothing, longest=4096, whose="the judge")


def test_a_normalizer_that_loses_text_and_an_end_that_stops_nothing_are_named(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", TINY_MODEL, lambda it: it.update(normalizer={"type": "Lowercase"}))
    shutil.copyfile(TINY_MODEL / "tokenizer_config.json", folder / "tokenizer_config.json")
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    notes: list[str] = []
    check_loads_the_same(TINY_MODEL, pytest.fail)
    check_loads_the_same(folder, notes.append)
    assert len(notes) == 2
    assert "does not restore texts exactly: 'Ünïcode" in notes[0]
    assert "generation stops only at [7]" in notes[1]
