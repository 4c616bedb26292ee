"""Compares two models' tokenizers: ids for every text tried, and the token for every id."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unicodedata import normalize

from tokenizers import AddedToken, Tokenizer

from tinkerscript.errors import ConfigError
from tinkerscript.gateway.samplers.remote import TOKENIZER_TEXT
from tinkerscript.model_folder import stop_ids_of

REMEDY = "logprobs of the same ids can be compared only between models with one tokenizer"

TOKENS_OF_TEXT = 1024

Encode = Callable[[str], Awaitable[Sequence[int] | None]]


def check_same_tokenizer(own: Path, other: Path, *, whose: str) -> None:
    """Raises ConfigError with the first difference. `whose` names the other model."""
    if (own / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes():
        return
    ours, theirs = _tokenizer(own), _tokenizer(other)
    difference = _of_vocabularies(ours, theirs) or _of_merges(ours, theirs) or _of_texts(ours, theirs)
    if difference:
        raise ConfigError(f"{whose} has another tokenizer than the model that trains: {difference}; {REMEDY}")


async def check_tokenizer_of_server(own: Path, encode: Encode, *, longest: int, whose: str) -> None:
    """Raises ConfigError with the first text, up to `longest` tokens, that `encode` encodes differently."""
    ours = _tokenizer(own)
    for text in _texts(ours, min(TOKENS_OF_TEXT, longest // 4)):
        theirs = await encode(text)
        if theirs is None:
            raise ConfigError(
                f"{whose} cannot be asked for token ids (it has no /tokenize), so its tokenizer cannot be "
                f"compared with that of the model that trains; {REMEDY}"
            )
        if difference := _of_ids(ours, text, theirs):
            raise ConfigError(
                f"{whose} has another tokenizer than the model that trains: {difference}; {REMEDY}"
            )


def check_loads_the_same(folder: Path, note: Callable[[str], None]) -> None:
    """Compare tokenizer.json, which makes the ids that train, with what transformers loads from a checkpoint.

    Raises ConfigError if transformers loads none, or ids or texts differ. `note` gets warnings about texts
    that do not survive a round trip, and an end-of-sequence token at which generation does not stop.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - Takes a second; servers import this module too.

    ours, difference, lost = _tokenizer(folder), "", ""
    texts = [TOKENIZER_TEXT, *_alphabet(ours)]
    ids = [_ids(ours, text) for text in texts]
    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        their_ids = [theirs.encode(text, add_special_tokens=False) for text in texts]
        their_texts = [theirs.decode(each, clean_up_tokenization_spaces=False) for each in ids]
    except Exception as error:  # The folder names any class, which may raise anything.
        raise _wrong_tokenizer(
            folder, "one that does not work", f"{type(error).__name__}: {error}"
        ) from error
    for text, own, others, read in zip(texts, ids, their_ids, their_texts, strict=True):
        plain = ours.decode(own, skip_special_tokens=False)
        difference = difference or _of_ids(ours, text, others)
        if not difference and read != plain:
            difference = f"it reads the ids of {plain[:20]!r} as {read[:20]!r}"
        lost = lost or _changed(normalize("NFC", text), plain)
    if difference:
        raise _wrong_tokenizer(folder, type(theirs).__name__, difference)
    if lost:
        note(f"engine.model: the tokenizer does not restore texts exactly: {lost}")
    stops = stop_ids_of(folder)
    if theirs.eos_token_id is not None and stops and theirs.eos_token_id not in stops:
        note(
            f"engine.model: the tokenizer ends a sequence with {theirs.eos_token!r} (id "
            f"{theirs.eos_token_id}), but generation stops only at {sorted(stops)}: replies may run "
            "on; see eos_token_id in generation_config.json"
        )


def _wrong_tokenizer(folder: Path, name: str, difference: str) -> ConfigError:
    return ConfigError(
        f"engine.model: the tokenizer that transformers loads from {folder} ({name}, by "
        f"tokenizer_config.json) is not that of tokenizer.json: {difference}; if tokenizer.json is right, "
        'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json'
    )


def _changed(text: str, back: str) -> str:
    one, other = text.strip(), normalize("NFC", back).strip()
    place = next((n for n, (mine, its) in enumerate(zip_longest(one, other)) if mine != its), None)
    return "" if place is None else f"{one[place : place + 20]!r} becomes {other[place : place + 20]!r}"


def _alphabet(tokenizer: Tokenizer) -> Iterator[str]:
    whole = tokenizer.get_vocab_size(with_added_tokens=False)
    pieces = tokenizer.decode_batch([[index] for index in range(whole)], skip_special_tokens=False)
    first = sorted({piece.strip()[:1] for piece in pieces} - {"", "\ufffd"})
    for start in range(0, len(first), TOKENS_OF_TEXT):
        yield " ".join(first[start : start + TOKENS_OF_TEXT])


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _of_vocabularies(ours: Tokenizer, theirs: Tokenizer) -> str:
    mine, other = _by_id(ours), _by_id(theirs)
    for index in sorted(mine.keys() | other.keys()):
        if mine.get(index) != other.get(index):
            return f"id {index} is {_shown(mine.get(index))} here, and {_shown(other.get(index))} there"
    return ""


def _by_id(tokenizer: Tokenizer) -> dict[int, tuple[str, str]]:
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
    """A text on which tokenizers are known to differ, then all tokens that are valid text."""
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
