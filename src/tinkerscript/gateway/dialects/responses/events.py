"""The events of a streamed response.

Invariant: items come one after another, and the last event repeats all of them. Function calls come last,
each with its arguments in one delta.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from typing import Any

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.dialect import (
    Completion,
    EventStream,
    MessageDelta,
    ReplyHeader,
    named_event,
)
from tinkerscript.gateway.dialects.openai import OpenAIDialect
from tinkerscript.gateway.dialects.responses.reply import Item, ResponseWriter
from tinkerscript.gateway.dialects.responses.request import ResponsesCall
from tinkerscript.gateway.tokenizer import LightTokenizer

_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}
"""Item type -> name of the events of its text."""


class ResponseEvents(EventStream):
    """One streamed response."""

    def __init__(self, tokenizer: LightTokenizer, call: ResponsesCall, header: ReplyHeader) -> None:
        self._write = ResponseWriter(tokenizer, call)
        self._header = header
        self._pending = self._write.pending(header)
        self._sent = 0
        """Events written so far."""

        self._opening = b"".join(self._lifecycle(kind, self._pending) for kind in ("created", "in_progress"))

        self._items = 0
        """Items started so far."""

        self._open: Item | None = None
        """The item that deltas extend, as it was before them."""

        self._text: list[str] = []
        """The deltas of the open item."""

        self._logprobs: list[dict[str, Any]] = []
        """Entries of ids whose text has not been sent yet."""

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
        """An `error`, which OpenAI's clients raise, then the failed response for clients that await it."""
        flat = {"code": error.code, "message": error.message, "param": error.param}
        # The `error` has our code; a response may only have one of OpenAI's.
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"code": code, "message": error.message}
        response = self._pending | {"status": "failed", "error": failed}
        return self._event("error", **OpenAIDialect.error(error), **flat) + self._lifecycle(
            "failed", response
        )

    def _begin(self, item: Item) -> bytes:
        """Open an item for text, unless it is open already; close another one that is."""
        if self._open and self._open["type"] == item["type"]:
            return b""
        # Only reasoning is followed by text.
        ended = (
            self._end(self._write.reasoning(self._header.call_id, "".join(self._text))) if self._open else b""
        )
        self._open = item
        return ended + self._added(item | {"content": []}) + self._part("content_part.added", item)

    def _end(self, item: Item) -> bytes:
        """Close the open item, which has become `item`."""
        self._open = None
        self._text.clear()
        return self._text_done(item) + self._part("content_part.done", item) + self._done(item)

    def _whole(self, item: Item) -> bytes:
        """An item of which nothing has been sent."""
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
