"""The events of a streamed response.

Invariant: items come one after the other, and the last event repeats them whole. Function calls come at the
end, each with its arguments in one delta.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from typing import Any

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.base import Completion, EventStream, MessageDelta, ReplyHeader, named_event
from tinkerscript.gateway.dialects.chat_events import error_body
from tinkerscript.gateway.dialects.responses_output import Item, ResponsesCall, ResponseWriter
from tinkerscript.gateway.tokenizer import LightTokenizer

_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}
"""Name of the events of an item's text."""


class ResponseEvents(EventStream):
    """One streamed response."""

    def __init__(self, tokenizer: LightTokenizer, call: ResponsesCall, header: ReplyHeader) -> None:
        self._write = ResponseWriter(tokenizer, call)
        self._header = header
        self._pending = self._write.pending(header.call_id, header.created, header.model)
        self._sent = 0
        """Events made so far."""

        self._opening = b"".join(self._lifecycle(kind, self._pending) for kind in ("created", "in_progress"))

        self._items = 0
        """Items begun so far."""

        self._open: Item | None = None
        """The item that deltas go into, as it was before them."""

        self._text: list[str] = []
        """What the deltas of the open item said."""

        self._logprobs: list[dict[str, Any]] = []
        """Entries of ids whose text was not told yet."""

    def start(self) -> bytes:
        return self._opening

    def delta(self, delta: MessageDelta) -> bytes:
        told = b""
        self._logprobs += self._write.entries(delta)
        if delta.reasoning:
            told += self._begin(self._write.reasoning(self._header.call_id, ""))
            told += self._told(delta.reasoning)
        if delta.content:
            told += self._begin(self._write.message(self._header.call_id, "", []))
            entries, self._logprobs = self._logprobs, []
            told += self._told(delta.content, logprobs=entries)
        return told

    def finish(self, completion: Completion) -> bytes:
        response = self._write.whole(completion)
        items: list[Item] = response["output"]
        told = self._end(items[self._items - 1]) if self._open else b""
        told += b"".join(self._whole(item) for item in items[self._items :])
        return told + self._lifecycle(response["status"], response)

    def failure(self, error: GatewayError) -> bytes:
        """An `error`, which OpenAI's clients raise, and the failed response for those that wait for it."""
        flat = {"code": error.code, "message": error.message, "param": error.param}
        # The `error` has our code; a response knows OpenAI's few alone.
        known = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"code": known, "message": error.message}
        response = self._pending | {"status": "failed", "error": failed}
        return self._event("error", **error_body(error), **flat) + self._lifecycle("failed", response)

    def _begin(self, item: Item) -> bytes:
        """Open an item for text, unless it is open; another one that is open is over then."""
        if self._open and self._open["type"] == item["type"]:
            return b""
        # Reasoning alone is followed by text.
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
        """An item of which nothing was told."""
        if item["type"] != "function_call":
            added = self._added(item | {"content": []}) + self._part(
                "content_part.added", self._write.message(self._header.call_id, "", [])
            )
            return added + self._end(item)
        added = self._added(item | {"arguments": "", "status": "in_progress"})
        arguments = item["arguments"]
        told = self._in_item("function_call_arguments.delta", item, delta=arguments)
        done = self._in_item("function_call_arguments.done", item, arguments=arguments, name=item["name"])
        return added + told + done + self._done(item)

    def _told(self, text: str, **more: Any) -> bytes:
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
