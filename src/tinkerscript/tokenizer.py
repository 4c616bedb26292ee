"""`LightTokenizer`: a folder's `tokenizer.json` with the methods that renderers call.

It needs only `tokenizers`, and adds no BOS token.

Renderers pass message text and their own markup to one `encode`, which would turn `<|im_end|>` in a message
into the token that ends a turn. So `SpecialTokenEscaper` marks special tokens in messages with U+FDD0, and
`encode` treats them as ordinary text, unchanged. Other tokens (Qwen3's `<think>`, `<tool_call>`,
`<tool_response>`) end no turn and are encoded as usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import msgspec
from tokenizers import Tokenizer, decoders, pre_tokenizers

from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import eos_token_of
from tinkerscript.rollouts.call import vocabulary_fingerprint

THINK_START, THINK_END = "<think>", "</think>"  # Qwen and most other models use these.

MARK = "\ufdd0"  # A Unicode noncharacter.
ESCAPED_MARK = "\\ufdd0"  # Some renderers write it; `encode` cannot undo it.

_SHORT_TEXT = 12  # Shorter texts are cached: prompts share role names and line breaks.
_SHORT_TEXTS = 1024
_CONTEXT = 4096  # Characters to search for the last special token.

T = TypeVar("T")


class SpecialTokenEscaper:
    def __init__(
        self, special: Iterable[str], *, lstrip: Collection[str] = (), rstrip: Collection[str] = ()
    ) -> None:
        """`lstrip` tokens swallow the white space before them, `rstrip` tokens the white space after them. No
        token's text may be empty.
        """
        longest_first = sorted(special, key=len, reverse=True)
        as_json = [msgspec.json.encode(text)[1:-1] for text in (*longest_first, MARK)]
        self._found = re.compile(b"|".join(map(re.escape, as_json)))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Possessive and anchored patterns match in linear time.
        patterns = [r"(?<!\s)\s++" + re.escape(text) + r"\s*+" * (text in rstrip) for text in lstrip]
        patterns += [re.escape(text) + r"\s*+" * (text in rstrip) for text in longest_first]
        self._splits = re.compile("|".join(patterns) or r"(?!)")

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.marked([self._unescaped(message) for message in messages], messages)

    def marked(self, value: T, original: T) -> T:
        """Mark special tokens. Returns `original` without any."""
        if not self._found.search(msgspec.json.encode(value)):
            return original
        return cast("T", _mapped(value, self._mark))

    def marks(self, token: str) -> bool:
        return bool(self._special.fullmatch(token))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split into unmarked text (False) and the renderer's special tokens (True), with the white space
        they swallow.
        """
        pieces: list[tuple[str, bool]] = []
        end = 0
        for match in self._splits.finditer(text):
            pieces += [(unmarked(text[end : match.start()]), False), (match[0], True)]
            end = match.end()
        return [(piece, special) for piece, special in [*pieces, (unmarked(text[end:]), False)] if piece]

    def _mark(self, text: str) -> str:
        text = text.replace(MARK, MARK + MARK)
        return self._special.sub(lambda match: match[0][0] + MARK + match[0][1:], text)

    def _unescaped(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls") or ()
        if not any("\\u" in call["function"]["arguments"] for call in calls):
            return message
        return {**message, "tool_calls": [self._unescaped_call(call) for call in calls]}

    def _unescaped_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        try:
            plain = json.dumps(json.loads(function["arguments"]), ensure_ascii=False)
        except (ValueError, RecursionError):
            return call
        if not self._special.search(plain):
            return call
        return {**call, "function": {**function, "arguments": plain}}


def unmarked(text: str) -> str:
    return re.sub(f"{MARK}({MARK}?)", r"\1", text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {change(key): _mapped(item, change) for key, item in items}
    return value


class LightTokenizer:
    """Implements `renderers.base.Tokenizer`."""

    unk_token_id: int | None = None

    def __init__(self, folder: Path) -> None:
        self.name_or_path: str = str(folder)  # `renderers` reads it.
        self._tokenizer = _load(folder / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token for token in added.values() if token.special]
        # Only tokens that are never part of a longer one.
        self.added_tokens: dict[str, int] = {token.content: index for index, token in added.items()}
        self.escaper = SpecialTokenEscaper(
            [token.content for token in special],
            lstrip=[token.content for token in special if token.lstrip],
            rstrip=[token.content for token in special if token.rstrip],
        )
        self._encode_short = lru_cache(maxsize=_SHORT_TEXTS)(self._encode)
        eos = eos_token_of(folder)
        self.eos_token_id: int | None = self._tokenizer.token_to_id(eos) if isinstance(eos, str) else eos
        self._byte_of_char = (
            _byte_level_alphabet() if isinstance(self._tokenizer.decoder, decoders.ByteLevel) else {}
        )

    @cached_property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return ids [N]. Special tokens count unless marked."""
        if MARK in text:
            return self._encode_marked(text)
        if len(text) <= _SHORT_TEXT and not add_special_tokens:
            return list(self._encode_short(text))
        return _encoded(self._tokenizer, text, add_special_tokens)

    def encode_after(self, prefix: str, text: str) -> list[int]:
        """Encode `text` after `prefix`: no token spans both, and no space comes between."""
        prefix = prefix[-_CONTEXT:]
        start = max((prefix.rfind(token) for token in self.added_tokens), default=-1)
        before = self.encode(prefix[start:]) if start >= 0 else []
        both = self.encode(prefix[start:] + text) if start >= 0 else []
        if before and both[: len(before)] == before:
            return both[len(before) :]
        return self._encode_marked(text, continues=True)

    def _encode_marked(self, text: str, *, continues: bool = False) -> list[int]:
        ids: list[int] = []
        for piece, special in self.escaper.pieces(text):
            plain = self._plain_continuing if ids or continues else self._plain
            tokenizer = self._tokenizer if special else plain
            ids += _encoded(tokenizer, piece)
        return ids

    @cached_property
    def _plain(self) -> Tokenizer:
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _plain_continuing(self) -> Tokenizer:
        """Like `_plain`, but adds nothing before the first word."""
        definition = json.loads(self._tokenizer.to_str())
        if not _without_first_space(definition):
            return self._plain
        plain = Tokenizer.from_str(json.dumps(definition))
        plain.encode_special_tokens = True
        return plain

    def _encode(self, text: str) -> list[int]:
        return _encoded(self._tokenizer, text)

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Decode ids. Invalid UTF-8 becomes U+FFFD."""
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces=True would alter the text")
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Return None for unknown pieces."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    @cached_property
    def fingerprint(self) -> str:
        return vocabulary_fingerprint(self._tokenizer.get_vocab(with_added_tokens=True))

    def token_bytes(self, token_id: int) -> list[int] | None:
        """A token's bytes, perhaps part of a UTF-8 character."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None or not self._byte_of_char:
            return None
        if all(char in self._byte_of_char for char in piece):
            return [self._byte_of_char[char] for char in piece]
        return list(piece.encode())

    def piece_text(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id)
        return "\ufffd" if piece is None else piece.replace("\u2581", " ")


def _encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Encode as a batch, which releases the GIL and skips offsets."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(f"the model folder {path.parent} has no {path.name}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # Malformed files raise bare Exception.
        raise ConfigError(f"{path} is not a tokenizer file: {error}") from error


def _without_first_space(part: Any) -> bool:
    """Make a tokenizer add no space before a text. Returns False if it adds none.

    SentencePiece's space between special tokens stays.
    """
    if isinstance(part, list):
        changed = [_without_first_space(each) for each in cast("list[Any]", part)]
        return any(changed)
    if not isinstance(part, dict):
        return False
    data = cast("dict[str, Any]", part)
    if data.get("type") == "Metaspace" and data.get("prepend_scheme") == "first":
        data["prepend_scheme"] = "never"
        return True
    return _without_first_space(list(data.values()))


def _byte_level_alphabet() -> dict[str, int]:
    """Invert GPT-2's `bytes_to_unicode`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table |= {chr(256 + index): byte for index, byte in enumerate(others)}
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise ConfigError("this version of `tokenizers` has another byte-level alphabet than GPT-2's")
    return table
