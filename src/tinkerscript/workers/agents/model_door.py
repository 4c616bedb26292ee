"""`ModelDoor`: the only way out of an agent's sandbox: model calls of one claim, and nothing else.

It listens on the sandbox's own loopback interface and sends requests on to the gateway, under the claim's
key, which never enters the sandbox. Invariant: only the model's routes pass. So a program in the sandbox can
end, claim or read no episode, not even its own.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import AsyncExitStack
from socket import socket
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

from tinkerscript.client.settings import CA_FILE, certificates
from tinkerscript.errors import ClaimLostError
from tinkerscript.workers.base_task import EpisodeModel

PLACEHOLDER_KEY = "the-sandbox-holds-no-key"
"""What agents send as their key."""

MAX_BODY_BYTES = 64 * 2**20

_POSTED = frozenset(
    f"/agent/v1/{name}"
    for name in (
        "chat/completions",
        "responses",
        "responses/input_tokens",
        "messages",
        "messages/count_tokens",
    )
)
_MODELS = "/agent/v1/models"
_CREDENTIALS = frozenset(
    {"authorization", "x-api-key", "host", "content-length", "connection", "transfer-encoding"}
)
"""Headers of a request that are not sent on; the last are of the connection."""

_CONNECTION = frozenset({"content-length", "transfer-encoding", "connection", "date", "server"})


class ModelDoor:
    """Open inside its `async with` block."""

    def __init__(self, model: EpisodeModel) -> None:
        self._base = model.anthropic_base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {model.api_key}"}
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self.answered = 0
        """Model calls that were answered."""

        self.refusals: Counter[str] = Counter()
        """What was asked for and refused, here or by the gateway: `STATUS METHOD PATH`."""

        self.last_refusal = ""
        """The gateway's last words to an agent that it refused."""

        self.refused = False
        """Whether the last model call was one that the gateway does not support."""

        self.lost: ClaimLostError | None = None
        """Set when the gateway says that the claim is lost."""

    async def __aenter__(self) -> ModelDoor:
        trusted = certificates(ca_file) if (ca_file := os.environ.get(CA_FILE)) else True
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=trusted),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
                auto_decompress=False,
            )
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def context_length(self) -> int:
        """Tokens that a prompt and its reply may have together."""
        assert self._session is not None, "use it inside `async with`"
        async with self._session.get(self._base + _MODELS, headers=self._headers) as reply:
            body = await reply.read()
            self._note(reply.status, "GET", _MODELS, body)
            if self.lost is not None:
                raise self.lost
            reply.raise_for_status()
        return int(json.loads(body)["data"][0]["max_model_len"])

    async def listen(self, listening: socket) -> None:
        """Serve what connects to a socket of the sandbox. Takes the socket."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listening).start()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        is_model_call = request.method == "POST" and request.path in _POSTED
        if not is_model_call and (request.method, request.path) != ("GET", _MODELS):
            self.refusals[f"404 {request.method} {request.path[:100]}"] += 1
            return web.json_response(
                {"error": {"message": "only the model can be reached from here"}}, status=404
            )
        assert self._session is not None
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _CREDENTIALS}
        sent: dict[str, Any] = {"headers": kept | self._headers, "data": await request.read()}
        async with self._session.request(request.method, self._base + request.path, **sent) as reply:
            return await self._send_on(request, reply)

    async def _send_on(self, request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        passed = {name: value for name, value in reply.headers.items() if name.lower() not in _CONNECTION}
        if reply.status != 200:
            body = await reply.read()
            self._note(reply.status, request.method, request.path, body)
            return web.Response(status=reply.status, headers=passed, body=body)
        response = web.StreamResponse(headers=passed)
        await response.prepare(request)
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        if request.method == "POST":
            self.answered += 1
            self.refused = False
        return response

    def _note(self, status: int, method: str, path: str, body: bytes) -> None:
        if status == 200:
            return
        self.refusals[f"{status} {method} {path}"] += 1
        self.last_refusal = body[:500].decode(errors="replace")
        # A prompt that is too long is the agent's own doing.
        self.refused = status == 400 and b"context_length_exceeded" not in body
        if status == 409 and b"claim_lost" in body:
            self.lost = ClaimLostError(self.last_refusal)
