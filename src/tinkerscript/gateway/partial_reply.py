"""`PartialReply` reads the text of a reply while its ids are still being sampled.

Its text is a prefix of the whole reply's. In doubt, it waits.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from tinkerscript.gateway.reply_format import ReplyFormat

TokenBytes = Callable[[int], Sequence[int] | None]


class _State(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    UNDECIDED = auto()  # Waits for the end.


class PartialReply:
    def __init__(
        self,
        token_bytes: TokenBytes,
        reply_format: ReplyFormat | None,
        *,
        stop_ids: Iterable[int],
        tool_calls: bool = False,
        cut_at: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        """With `plain`, all text is content. Without it and a `reply_format`, there is no text."""
        self._token_bytes = token_bytes
        self._format = reply_format or ReplyFormat()
        calls = self._format.calls if tool_calls and not plain else None
        self._call_openers = calls.openers if calls else ()
        self._bare = calls.bare if calls else ""
        self._stop_ids = frozenset(stop_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = _State.START
        if plain:
            self._state = _State.CONTENT
        elif reply_format is None or reply_format.harmony:
            self._state = _State.UNDECIDED
        self._reasoning, self._content = _StablePrefix(cut_at), _StablePrefix(cut_at, strip=not plain)
        self._text = ""

    def feed(self, ids: Iterable[int]) -> tuple[str, str]:
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
        if self._state is _State.START:
            self._start()
        if self._state is _State.REASONING:
            self._read_reasoning(reasoning)
        if self._state is _State.CONTENT:
            self._read_content(content)

    def _start(self) -> None:
        body = self._text.lstrip()
        opener = self._format.thinking[0]
        if body.startswith(opener):
            self._state, self._text = _State.REASONING, body[len(opener) :]
        elif not opener.startswith(body):
            self._state = _State.REASONING if self._format.prefilled else _State.CONTENT

    def _read_reasoning(self, reasoning: list[str]) -> None:
        closer = self._format.thinking[1]
        certain, marker = self._taken((closer, *self._call_openers))
        reasoning.append(self._reasoning.feed(certain))
        if marker == closer:
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
        found = min(
            ((at, marker) for marker in markers if (at := self._text.find(marker)) >= 0), default=None
        )
        end = found[0] if found else len(self._text) - _started(self._text, markers)
        certain, self._text = self._text[:end], self._text[end:]
        return certain, found[1] if found else ""


def _started(text: str, markers: Sequence[str]) -> int:
    longest = min(len(text), max(map(len, markers), default=0))
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


class _StablePrefix:
    """Holds back white space that will be stripped and text that may begin a stop string."""

    def __init__(self, cut_at: Sequence[str], *, strip: bool = True) -> None:
        self._cut_at = cut_at
        self._strip = strip
        self._longest = max((len(stop) for stop in cut_at), default=1)
        self._held = ""
        self._blank = strip

        self._leading = strip
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
        # Before the last `longest - 1` characters of the body, stop strings are complete.
        safe = max(body - (self._longest - 1), 0)
        cut = self._cut()
        if cut is not None:
            self._ended = cut + self._longest <= body
            safe = min(safe, cut)
        stable, self._held = self._held[:safe], self._held[safe:]
        return self._returned(stable)

    def _begun(self, text: str) -> str:
        self._blank = not text.strip()
        if not self._blank:
            return text
        self._held += text
        self._ended = self._cut() is not None
        self._held = self._held[max(len(self._held) - self._longest + 1, 0) :]
        return ""

    def end(self) -> str:
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
