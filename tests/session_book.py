"""A session together with the calls that were recorded from it."""

from __future__ import annotations

from typing import Any

import msgspec

from tinkerscript.gateway.conversation.session import Session
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


class Book:
    """A session together with the calls that were recorded from it."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self.session = Session(renderer)
        self.calls: list[Call] = []

    def ids(self, text: str, *, close: bool = True) -> list[int]:
        """`text` byte for byte (never merged), and the stop token."""
        pieces = [self.renderer.tokenizer.encode(char) for char in text]
        return [token for piece in pieces for token in piece] + (
            self.renderer.stop_token_ids[:1] if close else []
        )

    def marked(self, text: str) -> list[int]:
        """`text` with its markers as their own tokens, and the stop token."""
        return self.renderer.tokenizer.encode(text + "<|im_end|>")

    def ask(
        self,
        messages: list[dict[str, Any]],
        sampled: list[int],
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[Turn, dict[str, Any]]:
        turn = self.session.plan(list(messages), tools or [])
        return turn, self.answer(turn, sampled)

    def answer(self, turn: Turn, sampled: list[int]) -> dict[str, Any]:
        reply = self.renderer.parse(sampled, ParseOptions(tool_calls=bool(turn.tools)))
        call = Call(
            call_id=f"call{len(self.calls)}",
            parent_id=turn.parent.call_id if turn.parent else None,
            new_prompt=turn.new_prompt,
            images=turn.images,
            sampled=pack_ids(sampled),
            logprobs=pack_logprobs([-0.5] * len(sampled)),
            stop_reason="stop",
            policy_version=0,
            matched_by=turn.matched_by,
            fork_reason=turn.fork_reason,
            messages=msgspec.json.encode(turn.new_messages).decode(),
            reply=msgspec.json.encode(reply).decode(),
            tools="[]" if turn.parent else msgspec.json.encode(turn.tools).decode(),
        )
        self.calls.append(call)
        self.session.add(turn, call.call_id, call.sampled, reply)
        self.session.release(turn)
        return reply

    def restart(self) -> None:
        self.session = Session.restore(self.renderer, self.calls)
