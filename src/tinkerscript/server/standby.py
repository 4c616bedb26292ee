"""`StandbyGate`: what answers HTTP in a server's process, whether it serves episodes or waits.

Invariant: while another server serves, nothing here says anything about the episodes. Requests are refused so
that clients try again, and `/ready` with them, which tells a load balancer where to send them.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tinkerscript import __version__, tracing
from tinkerscript.asgi import Refusals
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.protocol import HealthResponse
from tinkerscript.server.app import InterchangeServer
from tinkerscript.server.passing import PassOn

STANDBY = "another server serves this run's episodes, or none does yet; try again"


class StandbyGate:
    """The process's ASGI app: that of the server while one serves, and else a refusal (503)."""

    def __init__(self) -> None:
        self._server: InterchangeServer | None = None
        self._refusals = Refusals(REFUSAL_BODIES)

    def open(self, server: InterchangeServer) -> None:
        """Let requests in."""
        self._server = server

    def close(self) -> None:
        """Refuse requests from now on. Those that are inside stop waiting."""
        self.stop_waiting()
        self._server = None

    def route(self, target: bytes) -> PassOn | None:
        """What answers a request of which this is the target's beginning; None: the app."""
        gateways = None if self._server is None else self._server.gateways
        return None if gateways is None else gateways.route(target)

    async def gateways_ended(self) -> None:
        """Return when the gateway processes have answered what they had and ended."""
        if self._server is not None and self._server.gateways is not None:
            await self._server.gateways.ended()

    async def say_farewell(self) -> None:
        """Wait until the clients of a finished run know that it is, for a moment at most."""
        if self._server is not None:
            await self._server.say_farewell()

    def stop_waiting(self) -> None:
        """Answer long polls and model calls that wait, so that their connections can close."""
        if self._server is not None:
            self._server.stop_waiting()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._server is not None:
            if tracing.is_on() and scope["type"] == "http":
                tracing.came_with(Headers(scope=scope).get(tracing.HEADER, ""))
            await self._server.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)
        else:  # A websocket.
            await send({"type": "websocket.close", "code": 1013, "reason": STANDBY})

    def _answer(self, scope: Scope) -> JSONResponse:
        if scope["path"] == "/health":
            return JSONResponse(HealthResponse(version=__version__).model_dump())
        refusal = self._refusals.refuse(Request(scope), 503, STANDBY)
        # A balancer of connections chooses again for the next one only.
        refusal.headers["Connection"] = "close"
        return refusal
