"""OpenAI's older text completions, without a chat format or a BOS token.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from tinkerscript.gateway.dialects.dialect import (
    Choice,
    Completion,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.openai import (
    ChunkStream,
    GenerationRequest,
    OpenAIDialect,
    envelope_of,
    usage_of,
)
from tinkerscript.gateway.dialects.validation import TopLogprobs, Unsupported, decode, invalid
from tinkerscript.limits import CHOICES
from tinkerscript.rollouts.call import pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampledTokens
from tinkerscript.tokenizer import LightTokenizer

_Prompt = str | list[str | int | list[int]]


class _Request(GenerationRequest, kw_only=True):
    prompt: _Prompt
    logprobs: TopLogprobs | None = None
    best_of: Annotated[Any, Unsupported(1)] = None
    echo: Annotated[Any, Unsupported(False)] = None
    suffix: Annotated[Any, Unsupported("")] = None


_DECODER = msgspec.json.Decoder(_Request)


def _prompts(tokenizer: LightTokenizer, prompt: _Prompt) -> list[bytes]:
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


@dataclass
class _ChoiceWriter:
    tokenizer: LightTokenizer
    call: ModelCall
    offsets: dict[int, _TextOffsets] = field(default_factory=dict[int, "_TextOffsets"])

    def choice(
        self,
        index: int,
        text: str,
        tokens: SampledTokens,
        *,
        finish_reason: str | None = None,
        with_prompt: bool = False,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens) if self.call.logprobs else None,
            "finish_reason": finish_reason,
        }
        if with_prompt:
            choice["prompt_token_ids"] = unpack_ids(self.call.prompts[index // self.call.n]).tolist()
        if self.call.return_token_ids:
            choice["token_ids"] = unpack_ids(tokens.sampled).tolist()
        return choice

    def _logprobs(self, index: int, tokens: SampledTokens) -> dict[str, Any]:
        decode, top = self.tokenizer.decode, self.call.top_logprobs
        ids = unpack_ids(tokens.sampled).tolist()
        names = [decode(token) for token in unpack_ids(tokens.top_ids).tolist()]
        most_likely = list(zip(names, unpack_logprobs(tokens.top_logprobs).tolist(), strict=True))
        offsets = self.offsets.setdefault(index, _TextOffsets(self.tokenizer))
        return {
            "tokens": [decode(token) for token in ids],
            "token_ids": ids,
            "token_logprobs": unpack_logprobs(tokens.logprobs).tolist(),
            # The most likely id of a text wins.
            "top_logprobs": [
                dict(reversed(most_likely[position * top : (position + 1) * top]))
                for position in range(len(ids))
            ]
            if top
            else None,
            "text_offset": [offsets.next(token) for token in ids],
        }


class _TextOffsets:
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


class _CompletionEvents(ChunkStream):
    def __init__(self, tokenizer: LightTokenizer, call: ModelCall, header: ReplyHeader) -> None:
        super().__init__(call, header, "cmpl", "text_completion")
        self._writer = _ChoiceWriter(tokenizer, call)
        self._prompts_sent: set[int] = set()

    def start(self) -> bytes:
        return b""

    def delta(self, delta: MessageDelta) -> bytes:
        writes_tokens = delta.sampled and (self._call.logprobs or self._call.return_token_ids)
        if not delta.content and not writes_tokens:
            return b""
        with_prompt = self._call.return_token_ids and delta.index not in self._prompts_sent
        self._prompts_sent.add(delta.index)
        return self._chunk_of(self._writer.choice(delta.index, delta.content, delta, with_prompt=with_prompt))

    def _end(self, index: int, choice: Choice) -> bytes:
        return self._chunk_of(
            {"index": index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
        )


class Completions(OpenAIDialect[ModelCall]):
    """OpenAI's `POST /completions`."""

    path = "/v1/completions"

    def parse(self, body: bytes) -> ModelCall:
        request = decode(_DECODER, body)
        arguments = request.shared_arguments()
        if isinstance(request.prompt, list):
            CHOICES.check(arguments["n"] * sum(not isinstance(each, int) for each in request.prompt))
        prompts = _prompts(self.tokenizer, request.prompt)
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

    def reply(self, call: ModelCall, completion: Completion) -> dict[str, Any]:
        writer = _ChoiceWriter(self.tokenizer, call)
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
        return {
            **envelope_of(completion, "cmpl", "text_completion"),
            "choices": choices,
            "usage": usage_of(call, completion),
        }

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return _CompletionEvents(self.tokenizer, call, header)
