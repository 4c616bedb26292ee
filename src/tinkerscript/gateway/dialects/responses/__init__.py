"""OpenAI Responses.

Our extensions: `top_k` and `return_token_ids` in the request; with the latter, `prompt_token_ids` and
`token_ids` (with a grammar also `constrained`) on the response, and `token_id` on each logprob entry.

`previous_response_id` continues from a response of the same claim, even after a restart and whatever `store`
was: a claim's calls are kept. As with OpenAI, that response's instructions do not carry over, and its tools
must be sent again. `include` supports `message.output_text.logprobs` (one entry per sampled id, on the text
part) and `reasoning.encrypted_content` (the reasoning in base64, beside the plain text). Accepted and
ignored: `store`, `metadata`, a function's `strict`, and the fields about caches and users.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from typing import Any

from tinkerscript.gateway.dialects.dialect import Completion, EventStream, ReplyHeader, TokenCounter
from tinkerscript.gateway.dialects.openai import OpenAIDialect
from tinkerscript.gateway.dialects.responses.events import ResponseEvents
from tinkerscript.gateway.dialects.responses.reply import ResponseWriter
from tinkerscript.gateway.dialects.responses.request import ResponsesCall, parse_count, parse_request


class Responses(OpenAIDialect[ResponsesCall], TokenCounter[ResponsesCall]):
    """OpenAI's `POST /responses`."""

    path = "/v1/responses"
    count_path = "/v1/responses/input_tokens"

    def parse(self, body: bytes) -> ResponsesCall:
        return parse_request(body)

    def parse_count(self, body: bytes) -> ResponsesCall:
        return parse_count(body)

    def reply(self, call: ResponsesCall, completion: Completion) -> dict[str, Any]:
        return ResponseWriter(self.tokenizer, call).response(completion)

    def count_reply(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def events(self, call: ResponsesCall, header: ReplyHeader) -> EventStream:
        return ResponseEvents(self.tokenizer, call, header)
