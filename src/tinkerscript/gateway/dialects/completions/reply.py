"""Text completions as OpenAI writes them: choices with parallel lists of logprobs.

Source: https://platform.openai.com/docs/api-reference/completions/object
"""

from __future__ import annotations

import codecs
from typing import Any

from tinkerscript.gateway.dialects.dialect import Completion, ModelCall
from tinkerscript.gateway.dialects.openai import fingerprint_of, usage_of
from tinkerscript.gateway.sampler import SampledTokens
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids, unpack_logprobs


def text_completion(tokenizer: LightTokenizer, call: ModelCall, completion: Completion) -> dict[str, Any]:
    """The reply to `call`."""
    writer = ChoiceWriter(tokenizer, call)
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
        "id": f"cmpl-{completion.call_id}",
        "object": "text_completion",
        "created": completion.created,
        "model": completion.model,
        "system_fingerprint": fingerprint_of(completion),
        "choices": choices,
        "usage": usage_of(sum(map(len, call.prompts)) // 4, completion),
    }


class ChoiceWriter:
    """Writes choices, whole or in consecutive parts."""

    def __init__(self, tokenizer: LightTokenizer, call: ModelCall) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._offsets: dict[int, _TextOffsets] = {}

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
            "logprobs": self._logprobs(index, tokens) if self._call.logprobs else None,
            "finish_reason": finish_reason,
        }
        if with_prompt:
            choice["prompt_token_ids"] = unpack_ids(self._call.prompts[index // self._call.n]).tolist()
        if self._call.return_token_ids:
            choice["token_ids"] = unpack_ids(tokens.sampled).tolist()
        return choice

    def _logprobs(self, index: int, tokens: SampledTokens) -> dict[str, Any]:
        """Parallel lists, one entry per sampled id, the stop token included."""
        decode, top = self._tokenizer.decode, self._call.top_logprobs
        ids = unpack_ids(tokens.sampled).tolist()
        names = [decode(token) for token in unpack_ids(tokens.top_ids).tolist()]
        most_likely = list(zip(names, unpack_logprobs(tokens.top_logprobs).tolist(), strict=True))
        offsets = self._offsets.setdefault(index, _TextOffsets(self._tokenizer))
        return {
            "tokens": [decode(token) for token in ids],
            "token_logprobs": unpack_logprobs(tokens.logprobs).tolist(),
            # Keyed by text: where two ids have the same text, the more likely one wins.
            "top_logprobs": [
                dict(reversed(most_likely[position * top : (position + 1) * top]))
                for position in range(len(ids))
            ]
            if top
            else None,
            "text_offset": [offsets.next(token) for token in ids],
        }


class _TextOffsets:
    """Where the text of each token starts, in characters of the reply."""

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
