"""Whether two models have the same tokenizer, by what is in it and what it does, whatever it is called.

Invariant: what passes gives the same ids for every text tried, among them one with every token of the
vocabulary, and the same token for every id.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tinkerscript.errors import ConfigError
from tinkerscript.gateway.samplers.remote import TOKENIZER_TEXT

__all__ = ["check_same_tokenizer", "check_tokenizer_of_server"]

REMEDY = "logprobs of the same ids can be compared only between models with one tokenizer"

TOKENS_OF_TEXT = 1024
"""Tokens of the vocabulary in one text."""

Encode = Callable[[str], Awaitable[Sequence[int] | None]]
"""A text -> its ids; None if there is no way to find out."""


def check_same_tokenizer(own: Path, other: Path, *, whose: str) -> None:
    """Compare the tokenizers in two models' folders. `whose`: the other one's model, for people.

    Raises ConfigError with the first difference: an id's token, a special token, a merge, or a text's ids.
    """
    if (own / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes():
        return
    ours, theirs = _tokenizer(own), _tokenizer(other)
    difference = _of_vocabularies(ours, theirs) or _of_merges(ours, theirs) or _of_texts(ours, theirs)
    if difference:
        raise ConfigError(f"{whose} has another tokenizer than the model that trains: {difference}; {REMEDY}")


async def check_tokenizer_of_server(own: Path, encode: Encode, *, longest: int, whose: str) -> None:
    """Compare the tokenizer in a model's folder with the one behind `encode`, which takes texts of up to
    `longest` tokens. Raises ConfigError with the first text that has other ids there."""
    ours = _tokenizer(own)
    for text in _texts(ours, min(TOKENS_OF_TEXT, longest // 4)):
        theirs = await encode(text)
        if theirs is None:
            raise ConfigError(
                f"{whose} does not say what its tokenizer does (it has no /tokenize), so that it cannot be "
                f"compared with that of the model that trains; {REMEDY}"
            )
        if difference := _of_ids(ours, text, theirs):
            raise ConfigError(
                f"{whose} has another tokenizer than the model that trains: {difference}; {REMEDY}"
            )


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _of_vocabularies(ours: Tokenizer, theirs: Tokenizer) -> str:
    mine, other = _by_id(ours), _by_id(theirs)
    for index in sorted(mine.keys() | other.keys()):
        if mine.get(index) != other.get(index):
            return f"id {index} is {_shown(mine.get(index))} here, and {_shown(other.get(index))} there"
    return ""


def _by_id(tokenizer: Tokenizer) -> dict[int, tuple[str, str]]:
    """Id -> its token, and what kind of token it is."""
    tokens = {index: (token, "") for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    kinds = {index: "special" if token.special else "added" for index, token in added.items()}
    return tokens | {index: (added[index].content, kind) for index, kind in kinds.items()}


def _shown(token: tuple[str, str] | None) -> str:
    if token is None:
        return "no token"
    text, kind = token
    return f"the {kind} token {text!r}" if kind else repr(text)


def _of_merges(ours: Tokenizer, theirs: Tokenizer) -> str:
    models: list[dict[str, Any]] = [json.loads(each.to_str())["model"] for each in (ours, theirs)]
    if models[0]["type"] != models[1]["type"]:
        return f"it is {models[1]['type']}, not {models[0]['type']}"
    pairs = zip_longest(*(model.get("merges") or [] for model in models))
    for number, (mine, other) in enumerate(pairs):
        if mine != other:
            return f"merge {number} is {mine} here, and {other} there"
    return ""


def _of_texts(ours: Tokenizer, theirs: Tokenizer) -> str:
    for text in _texts(ours, TOKENS_OF_TEXT):
        if difference := _of_ids(ours, text, _ids(theirs, text)):
            return difference
    return ""


def _texts(tokenizer: Tokenizer, size: int) -> Iterator[str]:
    """What tokenizers are known to do differently, then every token that is a text, `size` in each."""
    yield TOKENIZER_TEXT
    number = tokenizer.get_vocab_size(with_added_tokens=True)
    pieces = [tokenizer.decode([index], skip_special_tokens=False) for index in range(number)]
    whole = [piece for piece in pieces if piece and "\ufffd" not in piece]
    for start in range(0, len(whole), size):
        yield "\n".join(whole[start : start + size])


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _of_ids(tokenizer: Tokenizer, text: str, theirs: Sequence[int]) -> str:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    for place, (mine, other) in enumerate(zip_longest(encoding.ids, theirs)):
        if mine != other:
            start = encoding.offsets[place][0] if place < len(encoding.ids) else len(text)
            return f"at {text[start : start + 20]!r} its id is {other}, and {mine} here"
    return ""
