from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.dialect import (
    CallT,
    Choice,
    Completion,
    Dialect,
    EventStream,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.validation import (
    MaxTokens,
    Temperature,
    TopK,
    TopP,
    Unsupported,
    invalid,
    sampling_arguments,
)
from tinkerscript.limits import CHOICES, SEED, STOP_IDS, STOPS
from tinkerscript.rollouts.call import unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampledTokens
from tinkerscript.tokenizer import LightTokenizer

DONE = b"data: [DONE]\n\n"


_ENCODER = msgspec.json.Encoder()


class OpenAIDialect(Dialect[CallT]):
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


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    n: Annotated[int, Meta(ge=1, le=CHOICES.limit)] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-SEED.limit, le=SEED.limit)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=STOPS.limit)] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=STOP_IDS.limit)] | None
    ) = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Accepted and ignored.
    user: str | None = None
    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None

    def shared_arguments(self) -> dict[str, Any]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise invalid("stop", "a stop string must not be empty")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only allowed with stream=true")
        return {
            **sampling_arguments(self),
            "n": self.n or 1,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
            "seed": self.seed,
            "stop": stop,
            "stop_token_ids": self.stop_token_ids or [],
            "stream_usage": bool(self.stream_options and self.stream_options.include_usage),
        }


def usage_of(call: ModelCall, completion: Completion) -> dict[str, int]:
    prompt_tokens = sum(map(len, call.prompts)) // 4 or completion.prompt_tokens
    completion_tokens = sum(choice.num_tokens for choice in completion.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def envelope_of(header: ReplyHeader, prefix: str, kind: str) -> dict[str, Any]:
    # Unknown before sampling.
    version = header.policy_version if isinstance(header, Completion) else -1
    return {
        "id": f"{prefix}-{header.call_id}",
        "object": kind,
        "created": header.created,
        "model": header.model,
        "system_fingerprint": f"policy-{version}" if version >= 0 else None,
    }


class ChunkStream(EventStream):
    def __init__(self, call: ModelCall, header: ReplyHeader, prefix: str, kind: str) -> None:
        self._call = call
        self._kind = prefix, kind
        self._envelope = envelope_of(header, *self._kind)

    @abstractmethod
    def _end(self, index: int, choice: Choice) -> bytes: ...

    def _chunk_of(self, choice: dict[str, Any], **more: Any) -> bytes:
        if self._call.stream_usage:
            more["usage"] = None
        return data_event(self._envelope | {"choices": [choice]} | more)

    def finish(self, completion: Completion) -> bytes:
        self._envelope = envelope_of(completion, *self._kind)
        chunks = [self._end(index, choice) for index, choice in enumerate(completion.choices)]
        if self._call.stream_usage:
            chunks.append(
                data_event(self._envelope | {"choices": [], "usage": usage_of(self._call, completion)})
            )
        return b"".join((*chunks, DONE))

    def failure(self, error: GatewayError) -> bytes:
        return data_event(OpenAIDialect.error(error))


def logprob_entries(
    tokenizer: LightTokenizer, call: ModelCall, tokens: SampledTokens
) -> list[dict[str, Any]]:
    """Includes the stop token, and our `token_id`, because several ids may have the same text."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.decode(token_id),
            "bytes": tokenizer.token_bytes(token_id),
            "logprob": logprob,
            "token_id": token_id,
        }

    most_likely = [entry(*pair) for pair in _pairs(tokens.top_ids, tokens.top_logprobs)]
    top = call.top_logprobs
    return [
        {**entry(*pair), "top_logprobs": most_likely[position * top : (position + 1) * top]}
        for position, pair in enumerate(_pairs(tokens.sampled, tokens.logprobs))
    ]


def _pairs(ids: bytes, logprobs: bytes) -> Iterable[tuple[int, float]]:
    return zip(unpack_ids(ids).tolist(), unpack_logprobs(logprobs).tolist(), strict=True)


def data_event(data: dict[str, Any]) -> bytes:
    return b"data: " + _ENCODER.encode(data) + b"\n\n"
