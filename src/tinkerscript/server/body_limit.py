"""The limit on request bodies, as ASGI middleware.

Invariant: no more than `max_bytes` of a body are ever held, whether the request says its length or streams.
"""

from __future__ import annotations

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerscript.server.refusals import refusal


class BodyLimit:
    """Answers 413 to a request whose body is longer than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is None:
            await self._app(scope, self._counted(receive), send)
        elif int(length) > self._max_bytes:  # the HTTP parser has checked that it is a number
            await refusal(Request(scope), 413, self._reason(int(length)))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._reason(received))
            return message

        return counted

    def _reason(self, length: int) -> str:
        return (
            f"the body has {length} bytes or more; interchange_server.max_body_bytes allows {self._max_bytes}"
        )
