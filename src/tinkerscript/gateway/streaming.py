"""`LiveMessage` and `LiveText`: the text of an answer while its ids are still being sampled.

Invariant: whatever follows, the text told so far is a prefix of what `ChatRenderer.parse`, or `text`, gives
of all ids. Where that cannot be known (a tool call that may turn out broken, an unusual order of markers, a
chat format whose markers are not known here) nothing more is told until the end. Time is linear in the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

THINK_END = "</think>"

TokenBytes = Callable[[int], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class Markers:
    """The ids by which Qwen3's format tells reasoning and tool calls from text."""

    turn_start: int
    think: int
    think_end: int
    tool_call: int
    tool_call_end: int


class _Place(Enum):
    START = auto()
    """Before any text: reasoning may still open."""

    REASONING = auto()
    CONTENT = auto()
    HELD = auto()
    """Nothing more can be told before the end."""


class LiveMessage:
    """One message as it is sampled: `feed` ids, get the text that has become certain."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        markers: Markers | None,
        *,
        stop_ids: Iterable[int],
        tool_calls: bool,
        cut_at: Sequence[str] = (),
    ) -> None:
        """`markers` is None for a format that is not known here: all text is held then.

        `tool_calls` and `cut_at` are those of `ParseOptions`.
        """
        self._token_bytes = token_bytes
        self._markers = markers
        self._stop_ids = frozenset(stop_ids)
        self._tool_calls = tool_calls
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = _Place.HELD if markers is None else _Place.START
        self._first = True
        self._reasoning, self._content = _Certain(cut_at), _Certain(cut_at)
        self._tools_are_text = False
        self._tail = ""
        """The newest characters of reasoning, where the end marker may be half spelled out."""

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
        """The reasoning and the content that `ids` made certain; either may be empty."""
        reasoning, content = list[str](), list[str]()
        for token in ids:
            if self._place is _Place.HELD:
                break
            self._take(token, reasoning, content)
        return "".join(reasoning), "".join(content)

    def _take(self, token: int, reasoning: list[str], content: list[str]) -> None:
        markers, first = self._markers, self._first
        assert markers is not None
        self._first = False
        if token in self._stop_ids or (first and token == markers.turn_start):
            self._place = _Place.HELD
        elif self._place is _Place.START and token == markers.think:
            self._open_reasoning()
        elif self._place is _Place.REASONING:
            self._take_reasoning(token, markers, reasoning)
        elif token == markers.tool_call:
            self._take_tool_call(token, content)
        else:
            self._take_text(token, content)

    def _open_reasoning(self) -> None:
        """After white space alone the marker opens reasoning; after half of a character it is text."""
        self._place = _Place.HELD if self._flushed() else _Place.REASONING

    def _take_reasoning(self, token: int, markers: Markers, reasoning: list[str]) -> None:
        if token == markers.think_end:
            reasoning += [self._reasoning.feed(self._flushed()), self._reasoning.end()]
            self._place = _Place.CONTENT
        elif token in (markers.think, markers.tool_call):
            # A second opener, or a tool call that closes the reasoning unless a real end follows.
            self._place = _Place.HELD
        elif (text := self._text(token)) is not None:
            reasoning.append(self._reasoning.feed(text))
            seen = self._tail + text
            self._tail = seen[1 - len(THINK_END) :]
            if THINK_END in seen:
                # Spelled out, it makes the parser look for the content by text, which only the end decides.
                self._place = _Place.HELD

    def _take_tool_call(self, token: int, content: list[str]) -> None:
        content.append(self._content.feed(self._flushed()))
        if self._tool_calls:
            self._place = _Place.HELD
            return
        if not self._tools_are_text:
            self._tools_are_text = True
            self._content.next_part()
        self._take_text(token, content)

    def _take_text(self, token: int, content: list[str]) -> None:
        text = self._text(token)
        if text is None:
            return
        if text.strip():
            self._place = _Place.CONTENT
        content.append(self._content.feed(text))

    def _text(self, token: int) -> str | None:
        data = self._token_bytes(token)
        if data is None:
            self._place = _Place.HELD
            return None
        return self._decoder.decode(bytes(data))

    def _flushed(self) -> str:
        """U+FFFD for what is left of an unfinished character."""
        return self._decoder.decode(b"", final=True)


class LiveText:
    """Text that is no message, as it is sampled: `feed` ids, get the text that has become certain."""

    def __init__(
        self, token_bytes: TokenBytes, *, stop_ids: Iterable[int], cut_at: Sequence[str] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = _Certain(cut_at, strip=False)
        self._held = False

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
        """No reasoning, and the text that `ids` made certain."""
        told = list[str]()
        for token in ids:
            data = None if self._held or token in self._stop_ids else self._token_bytes(token)
            if data is None:
                self._held = True
                break
            told.append(self._text.feed(self._decoder.decode(bytes(data))))
        return "", "".join(told)


class _Certain:
    """What is certain of a text that will be stripped of outer white space and cut at stop strings.

    A text may have parts, each stripped, joined by a line break.
    """

    def __init__(self, cut_at: Sequence[str], *, strip: bool = True) -> None:
        self._cut_at = cut_at
        self._strip = strip
        self._longest = max((len(stop) for stop in cut_at), default=1)
        self._held = ""
        self._blank = strip
        """Whether this part has white space alone so far."""

        self._joint = ""
        self._over = False

    def feed(self, text: str) -> str:
        if self._over:
            return ""
        if self._blank:
            text = text.lstrip()
            if not text:
                return ""
            self._blank = False
            text, self._joint = self._joint + text, "\n"
        self._held += text
        body = len(self._held.rstrip() if self._strip else self._held)
        # A stop string that begins before the last `longest - 1` characters of the body is in full view.
        safe = max(body - (self._longest - 1), 0)
        cut = self._cut()
        if cut is not None:
            self._over = cut + self._longest <= body
            safe = min(safe, cut)
        told, self._held = self._held[:safe], self._held[safe:]
        return told

    def next_part(self) -> None:
        self._held = self._held.rstrip()
        self._blank = True

    def end(self) -> str:
        """Nothing follows: the rest."""
        if self._over:
            return ""
        self._over = True
        self._held = self._held.rstrip()
        return self._held[: self._cut()]

    def _cut(self) -> int | None:
        found = [place for stop in self._cut_at if (place := self._held.find(stop)) >= 0]
        return min(found, default=None)
