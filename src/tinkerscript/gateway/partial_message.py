"""`PartialMessage` and `PartialText`: the text of a reply while its ids are still being sampled.

Invariant: whatever comes next, the text returned so far is a prefix of what `ChatRenderer.parse`, or `text`,
returns for all ids. Where that cannot be known (a tool call that may turn out malformed, an unusual order of
markers, a chat format whose markers are unknown), no more text is returned. Time is linear in the number of
ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tinkerscript.gateway.reply_format import ReplyFormat
from tinkerscript.gateway.tokenizer import THINK_END

TokenBytes = Callable[[int], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class Markers:
    """The ids that delimit reasoning and tool calls in Qwen3's format."""

    turn_start: int
    think: int
    think_end: int
    tool_call: int
    tool_call_end: int


class _State(Enum):
    START = auto()
    """Before any text: reasoning may still start."""

    REASONING = auto()
    CONTENT = auto()
    UNDECIDED = auto()
    """No more text is certain before the end."""


class PartialMessage:
    """A message while it is sampled: `feed` ids, get the text that can no longer change."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        markers: Markers | None,
        *,
        stop_ids: Iterable[int],
        tool_calls: bool,
        cut_at: Sequence[str] = (),
    ) -> None:
        """`markers`: None for an unknown format, of which no text is returned.

        `tool_calls` and `cut_at` are those of `ParseOptions`.
        """
        self._token_bytes = token_bytes
        self._markers = markers
        self._stop_ids = frozenset(stop_ids)
        self._tool_calls = tool_calls
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = _State.UNDECIDED if markers is None else _State.START
        self._first = True
        self._reasoning, self._content = _StablePrefix(cut_at), _StablePrefix(cut_at)
        self._tools_are_text = False
        self._tail = ""
        """The last characters of reasoning, which may be part of a spelled-out end marker."""

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
        """The new reasoning and content that can no longer change; either may be empty."""
        reasoning, content = list[str](), list[str]()
        for token in ids:
            if self._state is _State.UNDECIDED:
                break
            self._take(token, reasoning, content)
        return "".join(reasoning), "".join(content)

    def _take(self, token: int, reasoning: list[str], content: list[str]) -> None:
        markers, first = self._markers, self._first
        assert markers is not None
        self._first = False
        if token in self._stop_ids or (first and token == markers.turn_start):
            self._state = _State.UNDECIDED
        elif self._state is _State.START and token == markers.think:
            self._open_reasoning()
        elif self._state is _State.REASONING:
            self._take_reasoning(token, markers, reasoning)
        elif token == markers.tool_call:
            self._take_tool_call(token, content)
        else:
            self._take_text(token, content)

    def _open_reasoning(self) -> None:
        """After nothing but white space the marker starts reasoning; after part of a character it is text."""
        self._state = _State.UNDECIDED if self._flushed() else _State.REASONING
        self._content.next_part()

    def _take_reasoning(self, token: int, markers: Markers, reasoning: list[str]) -> None:
        if token == markers.think_end:
            reasoning += [self._reasoning.feed(self._flushed()), self._reasoning.end()]
            self._state = _State.CONTENT
        elif token in (markers.think, markers.tool_call):
            # A second start, or a tool call, which ends the reasoning unless an end marker follows.
            self._state = _State.UNDECIDED
        elif (text := self._text(token)) is not None:
            reasoning.append(self._reasoning.feed(text))
            seen = self._tail + text
            self._tail = seen[1 - len(THINK_END) :]
            if THINK_END in seen:
                # Spelled out, the marker makes the parser split by text, which only the whole text decides.
                self._state = _State.UNDECIDED

    def _take_tool_call(self, token: int, content: list[str]) -> None:
        content.append(self._content.feed(self._flushed()))
        if self._tool_calls:
            self._state = _State.UNDECIDED
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
            self._state = _State.CONTENT
        content.append(self._content.feed(text))

    def _text(self, token: int) -> str | None:
        data = self._token_bytes(token)
        if data is None:
            self._state = _State.UNDECIDED
            return None
        return self._decoder.decode(bytes(data))

    def _flushed(self) -> str:
        """U+FFFD for the bytes of an unfinished character."""
        return self._decoder.decode(b"", final=True)


class PartialReply:
    """Like `PartialMessage`, for a reply that is read by its text (`reply_format`)."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        reply_format: ReplyFormat,
        *,
        stop_ids: Iterable[int],
        tool_calls: bool,
        cut_at: Sequence[str] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._opener, self._closer = reply_format.thinking
        self._prefilled = reply_format.prefilled
        calls = reply_format.calls if tool_calls else None
        self._call_openers = calls.openers if calls else ()
        self._bare = calls.bare if calls else ""
        """Characters with which content starts that may be a call."""

        self._stop_ids = frozenset(stop_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = _State.UNDECIDED if reply_format.harmony else _State.START
        self._reasoning, self._content = _StablePrefix(cut_at), _StablePrefix(cut_at)
        self._text = ""
        """Text that may be part of a marker."""

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
        """The new reasoning and content that can no longer change; either may be empty."""
        reasoning, content = list[str](), list[str]()
        for token in ids:
            if self._state is _State.UNDECIDED:
                break
            data = None if token in self._stop_ids else self._token_bytes(token)
            if data is None:
                self._state = _State.UNDECIDED
            else:
                self._text += self._decoder.decode(bytes(data))
                self._read(reasoning, content)
        return "".join(reasoning), "".join(content)

    def _read(self, reasoning: list[str], content: list[str]) -> None:
        """Take from the text what is certain."""
        if self._state is _State.START:
            self._start()
        if self._state is _State.REASONING:
            self._read_reasoning(reasoning)
        if self._state is _State.CONTENT:
            self._read_content(content)

    def _start(self) -> None:
        body = self._text.lstrip()
        if body.startswith(self._opener):
            self._state, self._text = _State.REASONING, body[len(self._opener) :]
        elif not self._opener.startswith(body):
            self._state = _State.REASONING if self._prefilled else _State.CONTENT

    def _read_reasoning(self, reasoning: list[str]) -> None:
        certain, marker = self._taken((self._closer, *self._call_openers))
        reasoning.append(self._reasoning.feed(certain))
        if marker == self._closer:
            self._state, self._text = _State.CONTENT, self._text[len(marker) :]
            reasoning.append(self._reasoning.end())
        elif marker:
            # A call ends the reasoning unless an end marker follows.
            self._state = _State.UNDECIDED

    def _read_content(self, content: list[str]) -> None:
        if self._bare:
            body = self._text.lstrip()
            if not body:
                return
            if body[0] in self._bare:
                self._state = _State.UNDECIDED
                return
            self._bare = ""
        certain, marker = self._taken(self._call_openers)
        content.append(self._content.feed(certain))
        if marker:
            self._state = _State.UNDECIDED

    def _taken(self, markers: Sequence[str]) -> tuple[str, str]:
        """Take the text before the first of `markers`, or before what may be the start of one.

        Returns the text, and the marker that follows it; "" if none does.
        """
        found = min(
            ((at, marker) for marker in markers if (at := self._text.find(marker)) >= 0), default=None
        )
        end = found[0] if found else len(self._text) - _started(self._text, markers)
        certain, self._text = self._text[:end], self._text[end:]
        return certain, found[1] if found else ""


def _started(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of `markers` starts with."""
    longest = min(len(text), max(map(len, markers), default=0))
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


class PartialText:
    """Plain text while it is sampled: `feed` ids, get the text that can no longer change."""

    def __init__(
        self, token_bytes: TokenBytes, *, stop_ids: Iterable[int], cut_at: Sequence[str] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = _StablePrefix(cut_at, strip=False)
        self._done = False

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
        """No reasoning, and the new text that can no longer change."""
        parts = list[str]()
        for token in ids:
            data = None if self._done or token in self._stop_ids else self._token_bytes(token)
            if data is None:
                self._done = True
                break
            parts.append(self._text.feed(self._decoder.decode(bytes(data))))
        return "", "".join(parts)


class _StablePrefix:
    """The prefix that cannot change of a text that will be cut at stop strings and then stripped.

    A text may have parts, each stripped, joined by a line break. White space around the text counts for stop
    strings, and is dropped.
    """

    def __init__(self, cut_at: Sequence[str], *, strip: bool = True) -> None:
        self._cut_at = cut_at
        self._strip = strip
        self._longest = max((len(stop) for stop in cut_at), default=1)
        self._held = ""
        self._blank = strip
        """Whether this part is all white space so far."""

        self._leading = strip
        """Whether no text was returned so far, so that white space is dropped."""

        self._joint = ""
        self._ended = False

    def feed(self, text: str) -> str:
        if self._ended:
            return ""
        if self._blank:
            text = self._begun(text)
            if not text:
                return ""
        self._held += text
        body = len(self._held.rstrip() if self._strip else self._held)
        # A stop string that starts before the last `longest - 1` characters of the body is complete.
        safe = max(body - (self._longest - 1), 0)
        cut = self._cut()
        if cut is not None:
            self._ended = cut + self._longest <= body
            safe = min(safe, cut)
        stable, self._held = self._held[:safe], self._held[safe:]
        return self._returned(stable)

    def _begun(self, text: str) -> str:
        """What of `text` begins the part; nothing while it is all white space."""
        body = text.lstrip()
        self._blank = not body
        if self._joint:
            return self._joint + body if body else ""
        if body:
            self._joint = "\n"
            return text
        self._held += text
        self._ended = self._cut() is not None
        self._held = self._held[max(len(self._held) - self._longest + 1, 0) :]
        return ""

    def next_part(self) -> None:
        self._held = self._held.rstrip()
        self._blank = True

    def end(self) -> str:
        """The rest of a text that is complete."""
        if self._ended:
            return ""
        self._ended = True
        cut = self._cut()
        return self._returned(self._held.rstrip() if cut is None else self._held[:cut])

    def _returned(self, text: str) -> str:
        text = text.lstrip() if self._leading else text
        self._leading = self._leading and not text
        return text

    def _cut(self) -> int | None:
        found = [start for stop in self._cut_at if (start := self._held.find(stop)) >= 0]
        return min(found, default=None)
