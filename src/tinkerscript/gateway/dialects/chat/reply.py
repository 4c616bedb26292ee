"""Chat completions as OpenAI writes them.

Source: https://platform.openai.com/docs/api-reference/chat/object
"""

from __future__ import annotations

from typing import Any

from tinkerscript.gateway.dialects.dialect import Choice, Completion, ModelCall
from tinkerscript.gateway.dialects.openai import fingerprint_of, logprob_entries, usage_of
from tinkerscript.gateway.sampler import SampledTokens
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids


def chat_completion(tokenizer: LightTokenizer, call: ModelCall, completion: Completion) -> dict[str, Any]:
    """The reply to `call`."""
    reply: dict[str, Any] = {
        "id": f"chatcmpl-{completion.call_id}",
        "object": "chat.completion",
        "created": completion.created,
        "model": completion.model,
        "system_fingerprint": fingerprint_of(completion),
        "choices": [_choice(tokenizer, call, index, each) for index, each in enumerate(completion.choices)],
        "usage": usage_of(completion.prompt_tokens, completion),
    }
    if call.return_token_ids:
        reply["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
    return reply


def _choice(tokenizer: LightTokenizer, call: ModelCall, index: int, choice: Choice) -> dict[str, Any]:
    message = choice.message
    if not message["content"] and message.get("tool_calls"):
        message = {**message, "content": None}
    written: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": logprobs_of(tokenizer, call, choice),
        "finish_reason": choice.finish_reason,
    }
    if call.return_token_ids:
        written |= choice.token_fields()
    return written


def logprobs_of(tokenizer: LightTokenizer, call: ModelCall, tokens: SampledTokens) -> dict[str, Any] | None:
    """The `logprobs` of a choice; None unless `call` asks for them."""
    if not call.logprobs:
        return None
    return {"content": logprob_entries(tokenizer, call, tokens), "refusal": None}
