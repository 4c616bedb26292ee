"""OpenAI's older completions: text or ids in, text out, no chat format and no BOS between.

A text prompt is encoded as it stands; ids are sampled from as they are. Our extensions: `top_k`, and
`return_token_ids`, which adds `token_ids` and `prompt_token_ids` to each choice.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import codecs
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.base import (
    Choice,
    Completion,
    Dialect,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
    decode,
    invalid,
    refuse_unhonoured,
)
from tinkerscript.gateway.dialects.chat_events import DONE, data_event, error_body, fingerprint_of
from tinkerscript.gateway.dialects.chat_request import MAX_CHOICES, MAX_STOPS, StreamOptions
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import pack_ids, unpack_ids, unpack_logprobs

MAX_LOGPROBS = 20

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "suffix": ("",),
}
"""Fields that are known and not honoured, with the values that ask for nothing. None always does."""


class _Request(Struct, forbid_unknown_fields=True):
    model: str
    prompt: str | list[str | int | list[int]]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted, of no consequence here.
    user: str | None = None
    # Known and not honoured: see _NEUTRAL.
    best_of: Any = None
    echo: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    suffix: Any = None


_DECODER = msgspec.json.Decoder(_Request)
_ENCODER = msgspec.json.Encoder()


class Completions(Dialect):
    """OpenAI's `POST /completions`."""

    path = "/completions"

    def __init__(self, tokenizer: LightTokenizer) -> None:
        """`tokenizer` encodes prompts and gives the text of single tokens for `logprobs`."""
        self._tokenizer = tokenizer

    def parse(self, body: bytes) -> ModelCall:
        request = decode(_DECODER, body)
        refuse_unhonoured(request, _NEUTRAL)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stop) > MAX_STOPS or not all(stop):
            raise invalid("stop", f"stop must be at most {MAX_STOPS} strings, none of them empty")
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options", "stream_options is only allowed with stream=true")
        prompts = self._prompts(request.prompt)
        n = request.n or 1
        if n * len(prompts) > MAX_CHOICES:
            problem = f"{len(prompts)} prompts with n={n} are more than {MAX_CHOICES} choices"
            raise invalid("n", problem)
        return ModelCall(
            model=request.model,
            messages=[],
            prompts=prompts,
            tools=[],
            parse_tool_calls=False,
            n=n,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or -1,
            seed=request.seed,
            stop=stop,
            logprobs=request.logprobs is not None,
            top_logprobs=request.logprobs or 0,
            return_token_ids=bool(request.return_token_ids),
            stream=bool(request.stream),
            stream_usage=bool(request.stream_options and request.stream_options.include_usage),
        )

    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        writer = _Writer(self._tokenizer, call)
        choices = [
            writer.choice(
                index,
                choice.message["content"],
                choice,
                finish_reason=choice.finish_reason,
                with_prompt=call.return_token_ids,
            )
            for index, choice in enumerate(completion.choices)
        ]
        reply: dict[str, Any] = {
            "id": f"cmpl-{completion.call_id}",
            "object": "text_completion",
            "created": completion.created,
            "model": completion.model,
            "system_fingerprint": fingerprint_of(completion),
            "choices": choices,
            "usage": _usage(call, completion),
        }
        return _ENCODER.encode(reply)

    def error(self, error: GatewayError) -> bytes:
        return _ENCODER.encode(error_body(error))

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return CompletionEvents(self._tokenizer, call, header)

    def _prompts(self, prompt: str | list[str | int | list[int]]) -> list[bytes]:
        """The ids (int32) of one prompt or of several."""
        if isinstance(prompt, str):
            return [self._encoded(prompt, "prompt")]
        ids = [each for each in prompt if isinstance(each, int)]
        if ids and len(ids) == len(prompt):
            return [self._checked(ids, "prompt")]
        if ids or not prompt:
            raise invalid("prompt", "prompt must be a text, a list of ids, or a list of one or the other")
        return [
            self._encoded(each, f"prompt[{place}]")
            if isinstance(each, str)
            else self._checked(each if isinstance(each, list) else [each], f"prompt[{place}]")
            for place, each in enumerate(prompt)
        ]

    def _encoded(self, text: str, where: str) -> bytes:
        return self._checked(self._tokenizer.encode(text, add_special_tokens=False), where)

    def _checked(self, ids: list[int], where: str) -> bytes:
        if not ids:
            raise invalid(where, f"{where} is empty: the model needs a token to go on from")
        known = self._tokenizer.vocab_size
        wrong = next((token for token in ids if not 0 <= token < known), None)
        if wrong is not None:
            raise invalid(where, f"{where} has the id {wrong}, which is not in [0, {known})")
        return pack_ids(ids)


class CompletionEvents(EventStream):
    """Chunks of a streamed completion; the usage, if asked for, comes last."""

    def __init__(self, tokenizer: LightTokenizer, call: ModelCall, header: ReplyHeader) -> None:
        self._call = call
        self._writer = _Writer(tokenizer, call)
        self._prompts_told: set[int] = set()
        self._envelope: dict[str, Any] = {
            "id": f"cmpl-{header.call_id}",
            "object": "text_completion",
            "created": header.created,
            "model": header.model,
            "system_fingerprint": None,
        }

    def start(self) -> bytes:
        return b""

    def delta(self, delta: MessageDelta) -> bytes:
        tells_tokens = delta.sampled and (self._call.logprobs or self._call.return_token_ids)
        if not delta.content and not tells_tokens:
            return b""
        with_prompt = self._call.return_token_ids and delta.index not in self._prompts_told
        self._prompts_told.add(delta.index)
        choice = self._writer.choice(delta.index, delta.content, delta, with_prompt=with_prompt)
        return self._chunk([choice])

    def finish(self, completion: Completion) -> bytes:
        self._envelope["system_fingerprint"] = fingerprint_of(completion)
        chunks = [
            self._chunk(
                [{"index": index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}]
            )
            for index, choice in enumerate(completion.choices)
        ]
        if self._call.stream_usage:
            chunks.append(self._chunk([], usage=_usage(self._call, completion)))
        return b"".join((*chunks, DONE))

    def failure(self, error: GatewayError) -> bytes:
        return data_event(error_body(error))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        more = {"usage": usage} if self._call.stream_usage else {}
        return data_event(self._envelope | {"choices": choices} | more)


class _Writer:
    """Choices in the old shape, whole or in parts that follow each other."""

    def __init__(self, tokenizer: LightTokenizer, call: ModelCall) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._offsets: dict[int, _Offsets] = {}

    def choice(
        self,
        index: int,
        text: str,
        tokens: Choice | MessageDelta,
        *,
        finish_reason: str | None = None,
        with_prompt: bool = False,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens) if self._call.logprobs else None,
            "finish_reason": finish_reason,
        }
        if with_prompt:
            choice["prompt_token_ids"] = unpack_ids(self._call.prompts[index // self._call.n]).tolist()
        if self._call.return_token_ids:
            choice["token_ids"] = unpack_ids(tokens.sampled).tolist()
        return choice

    def _logprobs(self, index: int, tokens: Choice | MessageDelta) -> dict[str, Any]:
        """Parallel lists, one entry for each sampled id, the stop token included."""
        decode, top = self._tokenizer.decode, self._call.top_logprobs
        ids = unpack_ids(tokens.sampled).tolist()
        names = [decode(token) for token in unpack_ids(tokens.top_ids).tolist()]
        best = list(zip(names, unpack_logprobs(tokens.top_logprobs).tolist(), strict=True))
        offsets = self._offsets.setdefault(index, _Offsets(self._tokenizer))
        return {
            "tokens": [decode(token) for token in ids],
            "token_logprobs": unpack_logprobs(tokens.logprobs).tolist(),
            # A dictionary by text: of alternatives with equal text the more probable one stays.
            "top_logprobs": [
                dict(reversed(best[place * top : (place + 1) * top])) for place in range(len(ids))
            ]
            if top
            else None,
            "text_offset": [offsets.next(token) for token in ids],
        }


class _Offsets:
    """Where the text of each token begins, in characters of the answer."""

    def __init__(self, tokenizer: LightTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token: int) -> int:
        start = self._characters
        data = self._tokenizer.token_bytes(token)
        text = self._tokenizer.decode(token) if data is None else self._decoder.decode(bytes(data))
        self._characters += len(text)
        return start


def _usage(call: ModelCall, completion: Completion) -> dict[str, int]:
    prompt_tokens = sum(map(len, call.prompts)) // 4
    completion_tokens = sum(len(choice.sampled) for choice in completion.choices) // 4
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
