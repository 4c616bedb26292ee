"""Whole replies of the wire formats, as choices that `choices.read_choice` can read.

The invariant: a choice holds all tokens of its answer, or no token texts. So a Responses reply without ids
gives none of its logprobs: they cover the text, and not the reasoning and tool calls around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.call import StopReason
from tinkerscript.rollouts.choices import as_plain

_LENGTH = ("length", "max_tokens", "incomplete")
"""What the wire formats say when the token limit ended an answer."""


def choices_of(response: Any) -> list[Any]:
    """The choices of a whole reply.

    Chat completions and completions; SGLang's own `/generate`; and, with the ids that our gateway adds on
    request, OpenAI Responses and Anthropic Messages. Raises AlignmentError for anything else.
    """
    plain = as_plain(response)
    if plain.get("choices"):
        return list(plain["choices"])
    if plain.get("meta_info"):
        return [plain]
    if plain.get("token_ids") is not None:
        return [_choice(plain)]
    raise AlignmentError(
        f"a reply of {', '.join(sorted(plain)) or 'nothing'} holds no choices; ask for chat completions or "
        "completions, or for token ids (return_token_ids, with this gateway)"
    )


def read_stop_reason(choice: Any) -> StopReason:
    """Whether the token limit ended the choice."""
    plain = as_plain(choice)
    reason = plain.get("finish_reason") or _section(plain.get("meta_info")).get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    return "length" if kind in _LENGTH else "stop"


def _choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    """A Responses or Messages reply as the one choice that it is."""
    items = [_section(item) for item in reply.get("output") or ()]
    messages = [reply] if reply.get("content") else [item for item in items if item.get("type") == "message"]
    parts = [_section(part) for message in messages for part in message.get("content") or ()]
    text = "".join(part["text"] for part in parts if part.get("type") in ("output_text", "text"))
    return {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": reply.get("stop_reason") or reply.get("status"),
        "token_ids": reply["token_ids"],
        "logprobs": {"content": [entry for part in parts for entry in part.get("logprobs") or ()]},
    }


def _section(value: Any) -> Mapping[str, Any]:
    return as_plain(value) if value is not None else {}
