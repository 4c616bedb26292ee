"""An OpenAI-compatible server of somebody else: keeps what it is asked, answers what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

KEY = "sk-outside-7f3a9c"

Message = dict[str, Any]
Answer = Callable[[dict[str, Any]], dict[str, Any] | str | web.Response]
"""From a request to its message, its text, or the whole response."""

Script = Callable[[list[Message]], Message | str | web.Response]
"""The same, from a request's messages."""


class OutsideChat:
    """Runs inside `async with outside_chat(answer)`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.asked: list[tuple[str, list[Message]]] = []
        """The key and the messages of each."""

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
        authorization = request.headers.get("Authorization", "")
        self.keys.add(authorization)
        self.asked.append((authorization.removeprefix("Bearer "), body["messages"]))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self.go.wait()
            said = self.answer(body)
        finally:
            self.open -= 1
        if isinstance(said, web.Response):
            return said
        message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        if body.get("stream"):
            return await _streamed(request, body, message)
        choices = [_choice(index, message) for index in range(body.get("n", 1))]
        return web.json_response(_completion("chat.completion", body, choices, usage=_usage(message)))

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
        )


def _completion(kind: str, body: Message, choices: list[Message], **more: Any) -> Message:
    return {"id": "x", "object": kind, "created": 1, "model": body["model"], "choices": choices, **more}


def _choice(index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "message": message, "finish_reason": "stop", "logprobs": None}


def _usage(message: dict[str, Any]) -> dict[str, int]:
    said = len(message.get("content") or "")
    return {"prompt_tokens": 11, "completion_tokens": said, "total_tokens": 11 + said}


async def _streamed(
    request: web.Request, body: dict[str, Any], message: dict[str, Any]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunks: list[dict[str, Any]] = [{"content": char} for char in message.get("content") or ""]
    if calls := message.get("tool_calls"):
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        chunks.append({"tool_calls": numbered})
    choices: list[list[Message]] = [[{"index": 0, "delta": chunk, "finish_reason": None}] for chunk in chunks]
    choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    events = [_completion("chat.completion.chunk", body, each) for each in choices]
    events.append(_completion("chat.completion.chunk", body, [], usage=_usage(message)))
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


def scripted_chat(script: Script) -> AbstractAsyncContextManager[OutsideChat]:
    return outside_chat(lambda request: script(request["messages"]))
