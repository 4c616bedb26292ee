"""`Upstream` is the HTTP connection to a server that samples for us.

A request that may have sampled is retried at most once, and only before the first byte of a reply. A
cancelled request closes its connection, which stops the server's work.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import httpx
import msgspec

from tinkerscript.errors import GatewayError

CONNECT_TIMEOUT_S = 5.0


_CONTEXT = re.compile(r"context length|maximum context|longer than the model|max_model_len", re.IGNORECASE)


_SHOWN = 500


# Before the first byte: no reply will come.
_NOTHING_ANSWERED = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError)


class Upstream:
    """Raises only GatewayError, which never contains the key."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        key_setting: str = "inference.api_key_env",
        max_in_flight: int = 256,
        timeout_s: float = 300.0,
        name: str = "",
    ) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.name = name or f"the inference server {self.url}"
        self._key = api_key
        self._key_setting = key_setting
        self._max_in_flight = max_in_flight
        self._slots = asyncio.Semaphore(max_in_flight)
        self._timeout_s = timeout_s
        self._open: set[asyncio.Timeout] = set()
        self._is_closed = False
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=max_in_flight + 8, max_keepalive_connections=max_in_flight),
            trust_env=False,
        )

    async def get(self, path: str) -> bytes | None:
        return await self._send("GET", path, None)

    async def post(self, path: str, body: Any) -> bytes:
        async with self.slot():
            reply = await self._send("POST", path, body)
        if reply is None:
            raise GatewayError(502, "engine_error", f"{self.name} has no {path}")
        return reply

    async def post_optional(self, path: str, body: Any) -> bytes | None:
        """`post` without the limit on concurrency. Returns None if the path does not exist."""
        return await self._send("POST", path, body)

    def close(self) -> None:
        self._is_closed = True
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(0)

    async def aclose(self) -> None:
        self.close()
        await self._http.aclose()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            message = (
                f"{self.name} has had {self._max_in_flight} requests open for {self._timeout_s:g} s; retry"
            )
            raise GatewayError(503, "engine_unavailable", message) from None
        try:
            yield
        finally:
            self._slots.release()

    @asynccontextmanager
    async def open(self, method: str, path: str, body: Any) -> AsyncGenerator[httpx.Response]:
        if self._is_closed:
            raise _shutting_down()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._open.add(limit)
                try:
                    response = await self._exchange(method, path, body)
                    try:
                        yield response
                    finally:
                        await response.aclose()
                finally:
                    self._open.discard(limit)
        except TimeoutError:
            if self._is_closed:
                raise _shutting_down() from None
            message = f"{self.name} did not answer within {self._timeout_s:g} s"
            raise GatewayError(504, "engine_timeout", message) from None
        except httpx.HTTPError as error:
            # Its text may reveal the address.
            message = f"{self.name} cannot be reached ({type(error).__name__}); retry"
            raise GatewayError(503, "engine_unavailable", message) from None

    async def check(self, response: httpx.Response) -> None:
        if not response.is_success:
            self.refuse(response.status_code, await response.aread())

    def refuse(self, status: int, body: bytes) -> NoReturn:
        said = self.without_key(message_of_refusal(body))
        if status in (400, 413, 422):
            if _CONTEXT.search(said):
                raise GatewayError(400, "context_length_exceeded", said, param="messages")
            raise GatewayError(400, "invalid_request", f"{self.name} refused the request: {said}")
        if status in (401, 403):  # The body may contain parts of the key.
            message = f"{self.name} refused our key (HTTP {status}); see {self._key_setting}"
            raise GatewayError(502, "engine_error", message)
        if status in (408, 504):
            raise GatewayError(504, "engine_timeout", f"{self.name} timed out: {said}")
        if status == 429 or status >= 500:
            raise GatewayError(503, "engine_unavailable", f"{self.name} answered {status}: {said}; retry")
        raise GatewayError(502, "engine_error", f"{self.name} answered {status}: {said}")

    def without_key(self, text: str) -> str:
        return text.replace(self._key, "(the key)") if self._key else text

    async def _send(self, method: str, path: str, body: Any) -> bytes | None:
        async with self.open(method, path, body) as response:
            content = await response.aread()
            if response.status_code == 404 and not _has_message(content):
                return None
            await self.check(response)
            return content

    async def _exchange(self, method: str, path: str, body: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        content = msgspec.json.encode(body) if body is not None else None
        request = self._http.build_request(method, path, content=content, headers=headers)
        try:
            return await self._http.send(request, stream=True)
        except _NOTHING_ANSWERED:
            # The server closed the connection or restarts.
            return await self._http.send(request, stream=True)


def _shutting_down() -> GatewayError:
    return GatewayError(503, "engine_unavailable", "the server is shutting down; retry")


class _Detail(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Detail | str | None = None
    message: str = ""
    detail: Any = None


def message_of_refusal(body: bytes) -> str:
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:_SHOWN].decode(errors="replace")
    error = refusal.error.message if isinstance(refusal.error, _Detail) else refusal.error
    return str(error or refusal.message or refusal.detail or body[:_SHOWN].decode(errors="replace"))[:_SHOWN]


def _has_message(body: bytes) -> bool:
    # Such a 404 comes from an existing endpoint.
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return bool(refusal.error or refusal.message)
