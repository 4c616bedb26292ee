"""Draws docs/token_buffer.svg: what one conversation's buffer holds, and what of it trains.

The conversation goes through the gateway's own renderer, session and merge, with the tiny model's tokenizer
and answers spelled one character a token. Run it after changing any of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tinkerscript.gateway.conversation.session import Session
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "token_buffer.svg"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'

WIDTH, ROW, LEFT = 900, 22, 12
SHOWN = 74
"""Characters of a span's text that are drawn."""

COLOURS = {"sampled": "#bfe5c4", "prompt": "#e8e8e8"}


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a sequence that are all sampled, or all not."""

    sampled: bool
    call: int
    """Number of the call that brought them."""

    start: int
    end: int
    text: str


class Conversation:
    """Calls that a session placed, answered with given texts."""

    def __init__(self) -> None:
        self._renderer = ChatRenderer(ROOT / "src" / "tinkerscript" / "engine" / "tiny")
        self._session = Session(self._renderer)
        self.calls: list[Call] = []

    def ask(self, messages: list[dict[str, Any]], answer: str) -> dict[str, Any]:
        """The assistant's message, after `answer` was sampled one character a token."""
        turn = self._session.plan(messages, [TOOL])
        tokenizer = self._renderer.tokenizer
        markers = ("<tool_call>", "</tool_call>")
        pieces = answer.replace(markers[0], "\0").replace(markers[1], "\1")
        spelled = [markers[ord(char)] if char in "\0\1" else char for char in pieces]
        ids = [number for piece in spelled for number in tokenizer.encode(piece)]
        sampled = [*ids, self._renderer.stop_token_ids[0]]
        reply = self._renderer.parse(sampled, ParseOptions(tool_calls=True))
        call = Call(
            call_id=str(len(self.calls) + 1),
            parent_id=turn.parent.call_id if turn.parent else None,
            new_prompt=turn.new_prompt,
            sampled=pack_ids(sampled),
            logprobs=pack_logprobs([-0.5] * len(sampled)),
            stop_reason="stop",
            policy_version=0,
            fork_reason=turn.fork_reason,
        )
        self.calls.append(call)
        self._session.add(turn, call.call_id, call.sampled, reply)
        return reply

    def spans(self, rollout: Rollout) -> list[Span]:
        spans: list[Span] = []
        start = 0
        for segment in rollout.segments:
            for sampled, end in ((False, segment.start), (True, segment.end)):
                text = self._renderer.tokenizer.decode(rollout.tokens[start:end].tolist())
                spans.append(Span(sampled, int(segment.call.call_id), start, end, text))
                start = end
        return spans


def converse() -> tuple[Conversation, tuple[Rollout, ...]]:
    """Three turns with a tool call; then the last turn again, after the program edited an answer."""
    talk = Conversation()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25?"}]
    messages.append(talk.ask(messages, CALL_TEXT))
    (call,) = messages[-1]["tool_calls"]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
    messages.append(talk.ask(messages, "42"))
    messages.append({"role": "user", "content": "And one more?"})
    talk.ask(messages, "43")
    edited = [*messages[:-2], {"role": "assistant", "content": "It is 42."}, messages[-1]]
    talk.ask(edited, "43!")
    return talk, merge_calls(talk.calls, episode_uuid="figure")


def render() -> str:
    """The whole figure."""
    talk, rollouts = converse()
    rows: list[str] = []
    top = 34
    for number, rollout in enumerate(rollouts, 1):
        cause = next((s.call.fork_reason for s in rollout.segments if s.call.fork_reason), None)
        title = f"Sequence {number}: {len(rollout.tokens)} tokens, {int(rollout.sampled.sum())} train"
        if cause and rollout.parent is not None:
            title += f"; {cause}: forks from sequence {rollout.parent + 1} after {rollout.fork} tokens"
        rows.append(_text(LEFT, top, title, weight="bold"))
        for span in talk.spans(rollout):
            top += ROW
            rows.append(_row(top, span))
        top += 2 * ROW
    body = "\n".join([*_legend(), *rows])
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">'
    return f'{opening}\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _row(top: int, span: Span) -> str:
    kind = "sampled" if span.sampled else "prompt"
    shown = json.dumps(span.text, ensure_ascii=False)[1:-1].replace('\\"', '"')
    if len(shown) > SHOWN:
        shown = shown[: SHOWN // 2 - 2] + " … " + shown[-SHOWN // 2 + 1 :]
    told = f"call {span.call}  {span.end - span.start:4} tokens  mask {int(span.sampled)}"
    place = f'x="{LEFT}" y="{top - 15}" width="{WIDTH - 2 * LEFT}" height="{ROW - 2}"'
    box = f'<rect {place} fill="{COLOURS[kind]}"/>'
    return box + "\n" + _text(LEFT + 6, top, told) + "\n" + _text(LEFT + 216, top, shown)


def _legend() -> list[str]:
    y = 14
    return [
        f'<rect x="{LEFT}" y="4" width="14" height="12" fill="{COLOURS["sampled"]}"/>',
        _text(LEFT + 20, y, "sampled by the policy: trains"),
        f'<rect x="{LEFT + 260}" y="4" width="14" height="12" fill="{COLOURS["prompt"]}"/>',
        _text(LEFT + 280, y, "rendered by the gateway: context only"),
    ]


def _text(x: int, y: int, text: str, *, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" xml:space="preserve">{escape(text)}</text>'


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
