"""An OpenAI-compatible server of somebody else: keeps what it is asked, answers what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

KEY = "sk-outside-7f3a9c"

Answer = Callable[[dict[str, Any]], dict[str, Any] | str | web.Response]
"""From a request to its message, its text, or the whole response."""


class OutsideChat:
    """Runs inside `async with outside_chat(answer)`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.open = 0
        self.most_open = 0
        self.go = asyncio.Event()
        """Requests wait for it."""

        self.go.set()
        self.url = ""
        self.models = ["served"]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self.go.wait()
            said = self.answer(body)
        finally:
            self.open -= 1
        if isinstance(said, web.Response):
            return said
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        if body.get("stream"):
            return await _streamed(request, body, message)
        choices = [_choice(index, message) for index in range(body.get("n", 1))]
        return web.json_response({"id": "x", "choices": choices, "usage": _usage(message)})

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})


def _choice(index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "message": message, "finish_reason": "stop"}


def _usage(message: dict[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": 11, "completion_tokens": len(message.get("content") or "")}


async def _streamed(
    request: web.Request, body: dict[str, Any], message: dict[str, Any]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunks: list[dict[str, Any]] = [{"content": char} for char in message.get("content") or ""]
    if calls := message.get("tool_calls"):
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        chunks.append({"tool_calls": numbered})
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": chunk}]} for chunk in chunks]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": _usage(message)})
    for event in events:
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def outside_chat(answer: Answer) -> AsyncIterator[OutsideChat]:
    server = OutsideChat(answer)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        server.go.set()
        await runner.cleanup()
