"""A chat server over HTTP whose replies are a function of the messages, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Message = dict[str, Any]
Script = Callable[[list[Message]], str | Message | web.Response]
"""From the messages of a request to the reply: its text, the whole message, or a refusal."""


class ChatServer:
    """What was asked is in `requests`: the key, and the messages."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[tuple[str, list[Message]]] = []
        self.models = set[str]()
        """What requests called the model."""

        self.url = ""

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.models.add(body["model"])
        self.requests.append((request.headers["Authorization"].removeprefix("Bearer "), body["messages"]))
        said = self.script(body["messages"])
        if isinstance(said, web.Response):
            return said
        message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if body.get("stream"):
            return await _streamed(request, message, finish)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return web.json_response(_chunk("chat.completion", choices=[choice], usage=_USAGE))


_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}


def _chunk(kind: str, **more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "policy", **more}


async def _streamed(request: web.Request, message: Message, finish: str) -> web.StreamResponse:
    calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or [])]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    chunks = [
        _chunk("chat.completion.chunk", choices=[{"index": 0, "delta": delta, "finish_reason": None}]),
        _chunk("chat.completion.chunk", choices=[{"index": 0, "delta": {}, "finish_reason": finish}]),
        _chunk("chat.completion.chunk", choices=[], usage=_USAGE),
    ]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in [*map(json.dumps, chunks), "[DONE]"]:
        await response.write(f"data: {chunk}\n\n".encode())
    await response.write_eof()
    return response


@asynccontextmanager
async def serving(script: Script) -> AsyncGenerator[ChatServer]:
    server = ChatServer(script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
