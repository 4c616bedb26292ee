"""Prompts of Qwen3's chat format, which `renderers` writes noting for each token where it comes from.

Nobody asks for that here, and it takes longer than to encode the texts. So its renderer gets a tokenizer that
encodes nothing yet (`DeferringTokenizer`), and is asked once only what it writes around each message
(`Frames`).

Invariant: the ids are those that it writes by itself. What a frame cannot express is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from renderers.base import Message, Tokenizer
from renderers.qwen3 import Qwen3Renderer

from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.tokenizer import THINK_END, THINK_START, LightTokenizer

_PROBE = "probe"

_MIXED = ("system", "user", "tool", "tool", "user", "system", "tool")
"""Roles of a conversation whose prompt tells whether the frames are right."""


class _Unencoded(int):
    """Stands for the ids of a text."""

    text: str


class DeferringTokenizer:
    """A tokenizer for renderers that only place what `encode` returns: it returns one id, which stands for
    those of the text until `encoded` puts them there."""

    def __init__(self, tokenizer: LightTokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """One id, which no tokenizer has."""
        unencoded = _Unencoded(-1)
        unencoded.text = text
        return [unencoded]

    def encoded(self, ids: Sequence[int]) -> list[int]:
        """`ids` with those of every text in its place."""
        found: list[int] = []
        for token in ids:
            if isinstance(token, _Unencoded):
                found += self.tokenizer.encode(token.text)
            else:
                found.append(token)
        return found


def deferring_renderer(renderer: Qwen3Renderer, tokenizer: DeferringTokenizer) -> Qwen3Renderer:
    """The same renderer over `tokenizer`."""
    return Qwen3Renderer(cast("Tokenizer", tokenizer), renderer.config)


class _Frame(NamedTuple):
    """What stands around the content of one role's messages."""

    opening: list[int]
    before: str
    """In one text with the content."""

    after: str
    between: list[int]
    """Instead of closing and opening, where another message of the role follows."""

    closing: list[int]


class Frames:
    """What a renderer writes around messages of the system, the user and tools, and after a reply."""

    def __init__(self, renderer: Qwen3Renderer, deferring: DeferringTokenizer) -> None:
        """`renderer` is over `deferring`. Raises ValueError if its format has no such frames."""
        self._renderer = renderer
        self._deferring = deferring
        self._encode = deferring.tokenizer.encode
        self._think, self._think_end = deferring.tokenizer.convert_tokens_to_ids([THINK_START, THINK_END])
        if self._think is None or self._think_end is None:
            raise ValueError("reasoning has no ids of its own")
        self._stops = renderer.get_stop_token_ids()
        self._frames = {role: self._frame(role) for role in ("system", "user", "tool")}
        user = self._frames["user"]
        _, (_, closing) = self._parts(["user"], prompts=True)
        self._prompting = closing[len(user.closing) :]
        """The head of the reply."""

        self._after_reply = self._between_turns(user)
        if self.prompt(_probes(_MIXED)) != deferring.encoded(self._written(_MIXED, prompts=True)):
            raise ValueError("this renderer does not write its messages one after the other")

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int] | None:
        """The whole prompt [P]; None if there are no messages, or one has no frame."""
        ids: list[int] = []
        closing: list[int] = []
        before = None
        for message in messages:
            role, content = message["role"], message.get("content")
            if (frame := self._frames.get(role)) is None or not isinstance(content, str):
                return None
            ids += frame.between if role == before else closing + frame.opening
            ids += self._encode(frame.before + content + frame.after)
            closing, before = frame.closing, role
        return ids + closing + self._prompting if messages else None

    def extension(
        self, tail: list[int], sampled: list[int], messages: Sequence[ChatMessage]
    ) -> list[int] | None:
        """What follows `tail + sampled`; None if a message has no frame, or the reply did not just end."""
        if not self._is_over(sampled) or tail[-len(self._prompting) :] != self._prompting:
            return None
        prompt = self.prompt(messages)
        return prompt and self._after_reply + prompt

    def _is_over(self, sampled: list[int]) -> bool:
        """Whether a reply ended its turn, and before that its reasoning, if it reasoned."""
        body = sampled[:-1]
        if sampled[-1:] != self._stops[:1] or any(stop in body for stop in self._stops):
            return False
        return self._think not in body or self._think_end in body[body.index(self._think) + 1 :]

    def _between_turns(self, user: _Frame) -> list[int]:
        prompt, reply = [*user.opening, *user.closing, *self._prompting], self._stops[:1]
        bridged = self._renderer.bridge_to_next_turn(prompt, reply, cast("list[Message]", _probes(["user"])))
        if bridged is None:
            raise ValueError("this renderer does not continue what was sampled")
        _, (before, _) = self._split(bridged.token_ids)
        return before[len(prompt) + len(reply) : len(before) - len(user.opening)]

    def _frame(self, role: str) -> _Frame:
        (text,), (opening, closing) = self._parts([role])
        _, (_, between, _) = self._parts([role, role])
        before, _, after = text.partition(_PROBE)
        return _Frame(opening, before, after, between, closing)

    def _parts(self, roles: Sequence[str], *, prompts: bool = False) -> tuple[list[str], list[list[int]]]:
        return self._split(self._written(roles, prompts=prompts))

    def _split(self, ids: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """The texts that have a probe in them, and the ids before, between, and after those."""
        texts: list[str] = []
        around: list[list[int]] = [[]]
        for token in ids:
            if isinstance(token, _Unencoded) and _PROBE in token.text:
                texts.append(token.text)
                around.append([])
            else:
                around[-1] += self._deferring.encoded([token])
        return texts, around

    def _written(self, roles: Sequence[str], *, prompts: bool) -> list[int]:
        messages = cast("list[Message]", _probes(roles))
        return self._renderer.render_ids(messages, add_generation_prompt=prompts)


def _probes(roles: Sequence[str]) -> list[ChatMessage]:
    return [{"role": role, "content": _PROBE} for role in roles]
