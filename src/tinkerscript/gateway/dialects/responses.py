"""OpenAI Responses: the route, its replies and its events (docs/protocol.md).

Ids are the call's id with a prefix (`resp_`; for items `rs_`, `msg_`, `fc_`), so a conversation sent back
names the call. Function calls come last, each with its arguments in one delta.

Source: https://platform.openai.com/docs/api-reference/responses/object,
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.dialect import (
    Choice,
    Completion,
    EventStream,
    MessageDelta,
    ReplyHeader,
    TokenCounter,
    named_event,
    reasoning_tokens,
)
from tinkerscript.gateway.dialects.openai import OpenAIDialect, logprob_entries
from tinkerscript.gateway.dialects.responses_request import (
    RESPONSE_PREFIX,
    ResponsesCall,
    encrypt,
    parse_count,
    parse_request,
)
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.sampler import SampledTokens
from tinkerscript.tokenizer import LightTokenizer

Item = dict[str, Any]


@dataclass
class ResponseWriter:
    tokenizer: LightTokenizer
    call: ResponsesCall

    def pending(self, header: ReplyHeader) -> dict[str, Any]:
        return {
            "id": f"{RESPONSE_PREFIX}{header.call_id}",
            "object": "response",
            "created_at": header.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": header.model,
            "output": [],
            "usage": None,
            **self.call.echo,
        }

    def response(self, completion: Completion) -> dict[str, Any]:
        (choice,) = completion.choices
        response = self.pending(completion)
        complete = choice.finish_reason != "length"
        response["status"] = "completed" if complete else "incomplete"
        if not complete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = self.items(completion.call_id, choice)
        response["usage"] = self._usage(completion.prompt_tokens, choice)
        if self.call.return_token_ids:
            response["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
            response |= choice.token_fields()
        return response

    def items(self, call_id: str, choice: Choice) -> list[Item]:
        message, items = choice.message, list[Item]()
        if reasoning := message.get("reasoning_content"):
            items.append(self.reasoning(call_id, reasoning))
        calls: list[dict[str, Any]] = message.get("tool_calls", [])
        if message["content"] or not calls:
            items.append(self.message(call_id, message["content"], self.entries(choice)))
        items += [self._function_call(call_id, call, number) for number, call in enumerate(calls)]
        if choice.finish_reason == "length":
            items[-1]["status"] = "incomplete"
        return items

    def reasoning(self, call_id: str, text: str) -> Item:
        item: Item = {
            "id": f"rs_{call_id}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
            "status": "completed",
        }
        return item | ({"encrypted_content": encrypt(text)} if self.call.encrypted_reasoning else {})

    def message(self, call_id: str, text: str, logprobs: list[dict[str, Any]]) -> Item:
        part: Item = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def entries(self, tokens: SampledTokens) -> list[dict[str, Any]]:
        return logprob_entries(self.tokenizer, self.call, tokens) if self.call.logprobs else []

    def _usage(self, inputs: int, choice: Choice) -> dict[str, Any]:
        outputs = choice.num_tokens
        return {
            "input_tokens": inputs,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": outputs,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(self.tokenizer, choice)},
            "total_tokens": inputs + outputs,
        }

    def _function_call(self, call_id: str, call: dict[str, Any], number: int) -> Item:
        name = call["function"]["name"]
        namespace, name = self.call.namespaces.get(name, (None, name))
        item: Item = {
            "id": f"fc_{call_id}_{number}",
            "type": "function_call",
            "call_id": call["id"],
            "name": name,
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        return item | ({"namespace": namespace} if namespace else {})


_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponseEvents(EventStream):
    def __init__(self, tokenizer: LightTokenizer, call: ResponsesCall, header: ReplyHeader) -> None:
        self._write = ResponseWriter(tokenizer, call)
        self._header = header
        self._pending = self._write.pending(header)
        self._sent = 0
        self._opening = b"".join(self._lifecycle(kind, self._pending) for kind in ("created", "in_progress"))

        self._items = 0

        self._open: Item | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def start(self) -> bytes:
        return self._opening

    def delta(self, delta: MessageDelta) -> bytes:
        sent = b""
        self._logprobs += self._write.entries(delta)
        if delta.reasoning:
            sent += self._begin(self._write.reasoning(self._header.call_id, ""))
            sent += self._text_delta(delta.reasoning)
        if delta.content:
            sent += self._begin(self._write.message(self._header.call_id, "", []))
            entries, self._logprobs = self._logprobs, []
            sent += self._text_delta(delta.content, logprobs=entries)
        return sent

    def finish(self, completion: Completion) -> bytes:
        response = self._write.response(completion)
        items: list[Item] = response["output"]
        rest = self._end(items[self._items - 1]) if self._open else b""
        rest += b"".join(self._whole(item) for item in items[self._items :])
        return rest + self._lifecycle(response["status"], response)

    def failure(self, error: GatewayError) -> bytes:
        # OpenAI's clients raise the `error`; others await the failed response.
        flat = {"code": error.code, "message": error.message, "param": error.param}
        # A response may only have one of OpenAI's codes.
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"code": code, "message": error.message}
        response = self._pending | {"status": "failed", "error": failed}
        return self._event("error", **OpenAIDialect.error(error), **flat) + self._lifecycle(
            "failed", response
        )

    def _begin(self, item: Item) -> bytes:
        if self._open and self._open["type"] == item["type"]:
            return b""
        ended = (
            self._end(self._write.reasoning(self._header.call_id, "".join(self._text))) if self._open else b""
        )
        self._open = item
        return ended + self._added(item | {"content": []}) + self._part("content_part.added", item)

    def _end(self, item: Item) -> bytes:
        self._open = None
        self._text.clear()
        return self._text_done(item) + self._part("content_part.done", item) + self._done(item)

    def _whole(self, item: Item) -> bytes:
        if item["type"] != "function_call":
            added = self._added(item | {"content": []}) + self._part(
                "content_part.added", self._write.message(self._header.call_id, "", [])
            )
            return added + self._end(item)
        added = self._added(item | {"arguments": "", "status": "in_progress"})
        arguments = item["arguments"]
        delta = self._in_item("function_call_arguments.delta", item, delta=arguments)
        done = self._in_item("function_call_arguments.done", item, arguments=arguments, name=item["name"])
        return added + delta + done + self._done(item)

    def _text_delta(self, text: str, **more: Any) -> bytes:
        item = self._open
        assert item is not None
        self._text.append(text)
        return self._in_item(f"{_TEXT[item['type']]}.delta", item, content_index=0, delta=text, **more)

    def _text_done(self, item: Item) -> bytes:
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        return self._in_item(f"{_TEXT[item['type']]}.done", item, content_index=0, text=part["text"], **more)

    def _added(self, item: Item) -> bytes:
        self._items += 1
        item = item | {"status": "in_progress"}
        return self._event("response.output_item.added", output_index=self._items - 1, item=item)

    def _done(self, item: Item) -> bytes:
        return self._event("response.output_item.done", output_index=self._items - 1, item=item)

    def _part(self, kind: str, item: Item) -> bytes:
        return self._in_item(kind, item, content_index=0, part=item["content"][0])

    def _in_item(self, kind: str, item: Item, **more: Any) -> bytes:
        return self._event(f"response.{kind}", item_id=item["id"], output_index=self._items - 1, **more)

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> bytes:
        return self._event(f"response.{kind}", response=response)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sent += 1
        return named_event({"type": kind, "sequence_number": self._sent - 1, **data})


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
