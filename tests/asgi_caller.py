"""One HTTP request to an ASGI application, by a client that may hang up at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope


class AsgiCaller:
    """Posts `body` when awaited by `run`; after `hang_up` the application is told that nobody listens."""

    def __init__(self, app: ASGIApp, path: str, body: Any, headers: Mapping[str, str]) -> None:
        self._app = app
        self._path = path
        self._body = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._asked = False
        self._gone = asyncio.Event()
        self.status: int | None = None
        """None until the application answers."""

        self.text = b""
        """What arrived; nothing arrives after hanging up."""

    def hang_up(self) -> None:
        self._gone.set()

    @property
    def hung_up(self) -> bool:
        return self._gone.is_set()

    async def run(self) -> AsgiCaller:
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("127.0.0.1", 1),
            "headers": self._headers,
        }
        await self._app(scope, self._receive, self._send)
        return self

    def json(self) -> Any:
        return msgspec.json.decode(self.text)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.text += message.get("body", b"")
