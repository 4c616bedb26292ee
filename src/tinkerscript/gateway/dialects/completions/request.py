"""Text completion requests, and the ids of their prompts.

Source: https://platform.openai.com/docs/api-reference/completions/create
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tinkerscript.gateway.dialects import openai
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.gateway.dialects.openai import MAX_CHOICES, MAX_TOP_LOGPROBS, GenerationRequest
from tinkerscript.gateway.dialects.validation import decode, invalid, refuse_unsupported_fields
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import pack_ids

_NO_OPS: dict[str, tuple[Any, ...]] = {
    **openai.NO_OPS,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that are known and not supported, with the values that change nothing."""

_Prompt = str | list[str | int | list[int]]


class _Request(GenerationRequest, kw_only=True):
    prompt: _Prompt
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Known and not supported: see _NO_OPS.
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


_DECODER = msgspec.json.Decoder(_Request)


def parse_completion_request(tokenizer: LightTokenizer, body: bytes) -> ModelCall:
    """Raises GatewayError 400 that names the field that is invalid or unsupported."""
    request = decode(_DECODER, body)
    refuse_unsupported_fields(request, _NO_OPS)
    arguments, prompts = request.shared_arguments(), _prompts(tokenizer, request.prompt)
    if arguments["n"] * len(prompts) > MAX_CHOICES:
        problem = f"{len(prompts)} prompts with n={arguments['n']} exceed the limit of {MAX_CHOICES} choices"
        raise invalid("n", problem)
    return ModelCall(
        messages=[],
        prompts=prompts,
        tools=[],
        parse_tool_calls=False,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs or 0,
        **arguments,
    )


def _prompts(tokenizer: LightTokenizer, prompt: _Prompt) -> list[bytes]:
    """The ids (int32) of each prompt."""
    if isinstance(prompt, str):
        return [_ids(tokenizer, prompt, "prompt")]
    ids = [each for each in prompt if isinstance(each, int)]
    if ids and len(ids) == len(prompt):
        return [_ids(tokenizer, ids, "prompt")]
    several = [each for each in prompt if not isinstance(each, int)]
    if ids or not several:
        raise invalid("prompt", "prompt must be a string, a list of ids, or a list of either")
    return [_ids(tokenizer, each, f"prompt[{index}]") for index, each in enumerate(several)]


def _ids(tokenizer: LightTokenizer, prompt: str | list[int], where: str) -> bytes:
    ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    if not ids:
        raise invalid(where, f"{where} is empty; the model needs at least one token to continue from")
    size = tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise invalid(where, f"{where} has the id {wrong}, which is not in [0, {size})")
    return pack_ids(ids)
