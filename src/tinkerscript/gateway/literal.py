"""`LiteralText`: what programs write stays text, also where it spells a special token.

Renderers hand message text and their own markup to one `encode`, which would turn `<|im_end|>` in a user's
message, or in what a tool fetched, into the token that ends a turn. So a special token in a message is marked
with a character (U+FDD0), and `LightTokenizer.encode` gives what is marked as ordinary text.

Invariant: no message, tool or argument can make a token that the tokenizer calls special, and no character of
them changes. Tokens that it does not call special (Qwen3's `<think>`, `<tool_call>`, `<tool_response>`) are
encoded as the model's own tokenizer does: they are text that prompts speak of, and none of them ends a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import msgspec

from tinkerscript.gateway.messages import ChatMessage

MARK = "\ufdd0"
"""A noncharacter of Unicode: not for interchange, so nobody's text means anything by it."""

ESCAPED_MARK = "\\ufdd0"
"""How a renderer that escapes JSON would write it, which `encode` could not undo."""

T = TypeVar("T")


class LiteralText:
    """Marks special tokens in text, and takes marked text apart."""

    def __init__(self, special: Iterable[str]) -> None:
        """`special`: the texts of the special tokens, none of them empty."""
        longest_first = sorted(special, key=len, reverse=True)
        as_json = [msgspec.json.encode(text)[1:-1] for text in (*longest_first, MARK)]
        self._found = re.compile(b"|".join(map(re.escape, as_json)))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """`messages` with every special token in their texts marked; the very same list if there is none."""
        return self.marked([self._unescaped(message) for message in messages], messages)

    def marked(self, value: T, original: T) -> T:
        """`value` with every special token in its texts marked; `original` if there is none."""
        if not self._found.search(msgspec.json.encode(value)):
            return original
        return cast("T", _mapped(value, self._mark))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """`text` without marks, in pieces: ordinary text (False) or a renderer's own special token (True)."""
        pieces: list[tuple[str, bool]] = []
        end = 0
        for match in self._special.finditer(text):
            pieces += [(unmarked(text[end : match.start()]), False), (match[0], True)]
            end = match.end()
        return [(piece, special) for piece, special in [*pieces, (unmarked(text[end:]), False)] if piece]

    def _mark(self, text: str) -> str:
        text = text.replace(MARK, MARK + MARK)
        return self._special.sub(lambda match: match[0][0] + MARK + match[0][1:], text)

    def _unescaped(self, message: ChatMessage) -> ChatMessage:
        """A message whose arguments spell no special token by escapes, which a renderer may undo."""
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
    """Marked text as it was."""
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
