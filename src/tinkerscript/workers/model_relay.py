"""`ModelRelay`: one address in the worker's own process for programs that cannot be given a key for each
episode.

A library that keeps its model clients, one for each endpoint and key, would keep one for every claim. It gets
the relay's address once instead, and the relay sends each request on under the claim of the conversation that
it is of, which a request header names.

Invariant: a request of a conversation that no episode has announced is refused; a claim's key never reaches
the program, only the server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType

from aiohttp import web

from tinkerscript.errors import ClientError, RequestRefusedError
from tinkerscript.workers.base_task import EpisodeModel

SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)


class RelayedEpisode:
    """The conversations of one episode, and what ended its model calls."""

    def __init__(self, model: EpisodeModel, routes: dict[str, RelayedEpisode]) -> None:
        self.model = model
        self._routes = routes
        self._sessions: set[str] = set()
        self.calls = 0
        self.error: ClientError | None = None
        """Why calls cannot go on: the claim is lost, or the server is not there."""

    def announce(self, session: str) -> None:
        """Requests that name this session are of this episode."""
        self._routes[session] = self
        self._sessions.add(session)

    def forget(self) -> None:
        """Refuse further requests of the episode."""
        for session in self._sessions:
            self._routes.pop(session, None)


class ModelRelay:
    """Listens on this machine alone, inside its `async with` block."""

    def __init__(self) -> None:
        self.url = ""
        """The base URL for OpenAI's clients: it ends in `/v1`."""

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

    @property
    def open_sessions(self) -> int:
        """Conversations that may be continued."""
        return len(self._routes)

    @contextmanager
    def episode(self, model: EpisodeModel) -> Generator[RelayedEpisode]:
        """Relay the conversations that are announced in this block to `model`."""
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
            reply = await model.endpoint.open_stream(url, model.api_key, body)
        except RequestRefusedError as error:
            return _refused(error.status, error.reason, error.code)
        except ClientError as error:
            relayed.error = error
            return _refused(400, str(error))  # No client tries this status again.
        relayed.calls += 1
        async with reply:
            answer = web.StreamResponse(headers={"Content-Type": reply.headers["Content-Type"]})
            await answer.prepare(request)
            async for chunk in reply.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
        return answer


def _refused(status: int, message: str, code: str = "") -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code or None}
    return web.json_response({"error": error}, status=status)
