"""What OpenAI's formats share: errors, request fields, logprob entries, usage, stream chunks.

Source: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.gateway.dialects.dialect import CallT, Completion, Dialect, ModelCall
from tinkerscript.gateway.dialects.validation import invalid
from tinkerscript.gateway.sampler import SampledTokens
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids, unpack_logprobs

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
DONE = b"data: [DONE]\n\n"

NO_OPS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
}
"""Fields of `GenerationRequest` that are known and not supported, with the values that change nothing."""

_ENCODER = msgspec.json.Encoder()


class OpenAIDialect(Dialect[CallT]):
    """A dialect with OpenAI's error object."""

    @staticmethod
    def error_body(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    """Random padding of chunks is not supported."""


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that chat and text completions share."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=MAX_STOPS)] | None
    ) = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Accepted and ignored.
    user: str | None = None
    # Known and not supported: see NO_OPS.
    frequency_penalty: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None

    def shared_arguments(self) -> dict[str, Any]:
        """These fields as arguments of `ModelCall`, all but `max_tokens`. Raises GatewayError 400."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS or not all(stop):
            raise invalid("stop", f"stop must be at most {MAX_STOPS} non-empty strings")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only allowed with stream=true")
        return {
            "model": self.model,
            "n": self.n or 1,
            "temperature": self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
            "seed": self.seed,
            "stop": stop,
            "stop_token_ids": self.stop_token_ids or [],
            "return_token_ids": bool(self.return_token_ids),
            "stream": bool(self.stream),
            "stream_usage": bool(self.stream_options and self.stream_options.include_usage),
        }


def usage_of(prompt_tokens: int, completion: Completion) -> dict[str, int]:
    """Token counts. `prompt_tokens`: of all prompts; each counts once, however many choices it has."""
    completion_tokens = sum(choice.num_tokens for choice in completion.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def fingerprint_of(completion: Completion) -> str | None:
    """`system_fingerprint`, which names the policy version; None for weights that have none."""
    return f"policy-{completion.policy_version}" if completion.policy_version >= 0 else None


def logprob_entries(
    tokenizer: LightTokenizer, call: ModelCall, tokens: SampledTokens
) -> list[dict[str, Any]]:
    """One entry per sampled id, the stop token included, with the `top_logprobs` that `call` asked for.

    With `return_token_ids` each entry has our extension `token_id`.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        known: dict[str, Any] = {
            "token": tokenizer.decode(token_id),
            "bytes": tokenizer.token_bytes(token_id),
            "logprob": logprob,
        }
        return {**known, "token_id": token_id} if call.return_token_ids else known

    most_likely = [entry(*pair) for pair in _pairs(tokens.top_ids, tokens.top_logprobs)]
    top = call.top_logprobs
    return [
        {**entry(*pair), "top_logprobs": most_likely[position * top : (position + 1) * top]}
        for position, pair in enumerate(_pairs(tokens.sampled, tokens.logprobs))
    ]


def _pairs(ids: bytes, logprobs: bytes) -> Iterable[tuple[int, float]]:
    return zip(unpack_ids(ids).tolist(), unpack_logprobs(logprobs).tolist(), strict=True)


def data_event(data: dict[str, Any]) -> bytes:
    """One unnamed server-sent event."""
    return b"data: " + _ENCODER.encode(data) + b"\n\n"
