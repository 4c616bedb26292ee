"""Relays for model calls of programs that must not, or cannot, hold a claim's key.

`ModelRelay` is for a library that would keep a model client per key; a header names the conversation.
`AgentRelay` is the only way out of an agent's sandbox, and passes only routes of the model.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from socket import socket
from types import TracebackType
from typing import Any

from aiohttp import web

from tinkerscript.errors import ClaimLostError, ClientError, RequestRefusedError
from tinkerscript.workers.base_task import EpisodeModel

SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 64 * 2**20

AGENT_MODELS = "/agent/v1/models"
AGENT_ROUTES = frozenset(
    f"/agent/v1/{name}"
    for name in (
        "chat/completions",
        "responses",
        "responses/input_tokens",
        "messages",
        "messages/count_tokens",
    )
)

logger = logging.getLogger(__name__)


class RelayedEpisode:
    def __init__(self, model: EpisodeModel, routes: dict[str, RelayedEpisode]) -> None:
        self.model = model
        self._routes = routes
        self._sessions: set[str] = set()
        self.calls = 0
        # A lost claim or an unreachable server.
        self.error: ClientError | None = None

    def announce(self, session: str) -> None:
        self._routes[session] = self
        self._sessions.add(session)

    def forget(self) -> None:
        for session in self._sessions:
            self._routes.pop(session, None)


class ModelRelay:
    """Listens only on this machine."""

    def __init__(self) -> None:
        self.url = ""  # For OpenAI's clients; ends in `/v1`.
        self._routes: dict[str, RelayedEpisode] = {}
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/{path:.+}", self._relay)
        self._runner = web.AppRunner(app, access_log=None)

    async def __aenter__(self) -> ModelRelay:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @contextmanager
    def episode(self, model: EpisodeModel) -> Generator[RelayedEpisode]:
        relayed = RelayedEpisode(model, self._routes)
        try:
            yield relayed
        finally:
            relayed.forget()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        relayed = self._routes.get(request.headers.get(SESSION_HEADER, ""))
        if relayed is None:
            return _refused(403, "this conversation is of no running episode")
        model, body = relayed.model, await request.read()
        if model.sampling:
            body = json.dumps({**json.loads(body), **model.sampling}).encode()
        url = f"{model.base_url.rstrip('/')}/{request.match_info['path']}"
        try:
            answer = await _streamed(request, url, model, body)
        except RequestRefusedError as error:
            return _refused(error.status, error.reason, error.code)
        except ClientError as error:
            relayed.error = error
            return _refused(400, str(error))  # No client retries this status.
        relayed.calls += 1
        return answer


class AgentRelay:
    def __init__(self, model: EpisodeModel) -> None:
        self._model = model
        self._models: dict[str, Any] = {}
        self.answered = 0
        self.refusals: Counter[str] = Counter()  # By `STATUS METHOD PATH`.
        self.last_refusal = ""
        self.refused = False  # For the last model call.
        self.lost: ClaimLostError | None = None

    async def context_length(self) -> int:
        """Return the maximum tokens of prompt and reply together."""
        url = f"{self._model.anthropic_base_url.rstrip('/')}{AGENT_MODELS}"
        self._models = await self._model.endpoint.get_json(url, self._model.api_key)
        return int(self._models["data"][0]["max_model_len"])

    @asynccontextmanager
    async def listening(self, listening: socket) -> AsyncGenerator[None]:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            yield
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if (request.method, request.path) == ("GET", AGENT_MODELS):
            return web.json_response(self._models)
        if request.method != "POST" or request.path not in AGENT_ROUTES:
            self.refusals[f"404 {request.method} {request.path[:100]}"] += 1
            return _refused(404, "only the model can be reached from here")
        url = f"{self._model.anthropic_base_url.rstrip('/')}{request.path}"
        try:
            answer = await _streamed(request, url, self._model, await request.read())
        except RequestRefusedError as error:
            self.refusals[f"{error.status} POST {request.path}"] += 1
            self.last_refusal = error.reason
            # A prompt that is too long is the agent's mistake.
            self.refused = error.status == 400 and error.code != "context_length_exceeded"
            return _refused(error.status, error.reason, error.code)
        except ClaimLostError as error:
            self.lost = error
            return _refused(409, str(error), "claim_lost")
        except ClientError as error:
            self.last_refusal = str(error)
            return _refused(503, str(error))
        self.answered += 1
        self.refused = False
        return answer


async def _streamed(request: web.Request, url: str, model: EpisodeModel, body: bytes) -> web.StreamResponse:
    async with await model.endpoint.open_stream(url, model.api_key, body) as reply:
        answer = web.StreamResponse(headers={"Content-Type": reply.headers["Content-Type"]})
        await answer.prepare(request)
        async for chunk in reply.content.iter_any():
            await answer.write(chunk)
        await answer.write_eof()
    return answer


def _refused(status: int, message: str, code: str = "") -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code or None}
    return web.json_response({"type": "error", "error": error}, status=status)
