from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp

from tinkerscript.client.settings import CA_FILE, certificates
from tinkerscript.errors import ClaimLostError, RequestRefusedError, ServerUnreachableError

_BUSY = (429, 503)
# No connection, or a proxy without a server.
_AWAY = (0, 502, 503, 504)

_TIMED_OUT = -1


@dataclass(frozen=True)
class RetryPolicy:
    attempts: int = 6  # That end in a server error.
    max_away_s: float = 300.0  # In total; claims outlive a restart.
    first_delay_s: float = 0.25  # Doubles up to `max_delay_s`, with a jitter of 50%.
    max_delay_s: float = 8.0
    max_busy_s: float = 600.0  # For the `Retry-After` of 429 and 503.


Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class ChatAttempt(Generic[Reply]):
    status: int  # 0 if the connection failed, or `_TIMED_OUT`.
    said: bytes
    reply: Reply | None
    retry_after: float | None


class ChatEndpoint:
    """A connection pool per gateway process (base URL), for one event loop.

    Calls are retried while the server restarts or is busy. aiohttp takes a fraction of httpx's CPU time per
    request.
    """

    def __init__(
        self,
        *,
        connections: int = 512,
        call_timeout_s: float = 900.0,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connections = connections
        self._timeout = aiohttp.ClientTimeout(total=call_timeout_s, sock_connect=30.0)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def complete(self, base_url: str, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST `body` to `{base_url}/chat/completions`.

        Raises ClaimLostError (409), RequestRefusedError, and ServerUnreachableError when retries end.
        """
        url = f"{base_url.rstrip('/')}/chat/completions"
        data = json.dumps(body, separators=(",", ":")).encode()
        return json.loads(await self._answer(url, api_key, data, "application/json", self.whole))

    async def get_json(self, url: str, api_key: str) -> dict[str, Any]:
        return json.loads(await self._answer(url, api_key, None, "application/json", self.whole))

    async def open_stream(self, url: str, api_key: str, data: bytes) -> aiohttp.ClientResponse:
        """Return the accepted reply with an unread body; the caller closes it.

        Raises like `complete`. Nothing is retried after the reply has begun.
        """
        return await self._answer(url, api_key, data, "application/json", self._open)

    async def send_bytes(self, url: str, api_key: str, data: bytes) -> None:
        await self._answer(url, api_key, data, "application/octet-stream", self.whole)

    async def _answer(
        self,
        url: str,
        api_key: str,
        data: bytes | None,
        content_type: str,
        send: Callable[[str, bytes | None, dict[str, str]], Awaitable[ChatAttempt[Reply]]],
    ) -> Reply:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": content_type}
        failures, waited, away = 0, 0.0, 0.0
        while True:
            attempt = await send(url, data, headers)
            if attempt.reply is not None:
                return attempt.reply
            if (
                attempt.status in _BUSY
                and attempt.retry_after is not None
                and waited < self._retry.max_busy_s
            ):
                waited += attempt.retry_after
                await self._sleep(attempt.retry_after)
                continue
            failures += 1
            _raise_refusal(attempt.status, attempt.said)
            delay_s = self._delay(failures)
            away = away + delay_s if attempt.status in _AWAY else 0.0
            if away > self._retry.max_away_s or (not away and failures >= self._retry.attempts):
                raise ServerUnreachableError(
                    f"{url}: {failures} attempts failed, the last one: {_words(attempt.said)}"
                )
            await self._sleep(delay_s)

    async def aclose(self) -> None:
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    async def whole(self, url: str, data: bytes | None, headers: dict[str, str]) -> ChatAttempt[bytes]:
        attempt = await self._open(url, data, headers)
        if attempt.reply is None:
            return ChatAttempt(attempt.status, attempt.said, None, attempt.retry_after)
        try:
            async with attempt.reply as response:
                return ChatAttempt(200, b"", await response.read(), None)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _unreachable(error)
        except TimeoutError:
            return self._timed_out()

    async def _open(
        self, url: str, data: bytes | None, headers: dict[str, str]
    ) -> ChatAttempt[aiohttp.ClientResponse]:
        try:
            method = "GET" if data is None else "POST"
            response = await self._session_of(url).request(method, url, data=data, headers=headers)
            if response.status == 200:
                return ChatAttempt(200, b"", response, None)
            async with response:
                said = await response.read()
                return ChatAttempt(
                    response.status, said, None, retry_after_s(response.headers.get("Retry-After"))
                )
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _unreachable(error)
        except TimeoutError:
            return self._timed_out()

    def _timed_out(self) -> ChatAttempt[Any]:
        said = f"no answer within {self._timeout.total:g} s".encode()
        return ChatAttempt(_TIMED_OUT, said, None, None)

    def _session_of(self, url: str) -> aiohttp.ClientSession:
        process = url.partition("/v1/")[0] if "/v1/" in url else url.rpartition("/")[0]
        if process not in self._sessions:
            trusted = certificates(ca_file) if (ca_file := os.environ.get(CA_FILE)) else True
            connector = aiohttp.TCPConnector(limit=self._connections, ssl=trusted)
            self._sessions[process] = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._sessions[process]

    def _delay(self, failures: int) -> float:
        delay = min(self._retry.first_delay_s * 2 ** (failures - 1), self._retry.max_delay_s)
        return delay * random.uniform(0.5, 1.5)


def _unreachable(error: Exception) -> ChatAttempt[Any]:
    return ChatAttempt(0, f"{type(error).__name__}: {error}".encode(), None, None)


def _raise_refusal(status: int, reply: bytes) -> None:
    if status <= 0 or status == 429 or status >= 500:
        return
    if status == 409 and _error(reply).get("code") == "claim_lost":
        raise ClaimLostError(_words(reply))
    raise RequestRefusedError(status, _words(reply), str(_error(reply).get("code") or ""))


def _error(reply: bytes) -> dict[str, Any]:
    try:
        error = json.loads(reply)["error"]
    except (ValueError, TypeError, KeyError):
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _words(reply: bytes) -> str:
    return str(_error(reply).get("message") or reply.decode(errors="replace")[:500])


def retry_after_s(header: str | None) -> float | None:
    try:
        seconds = float(header) if header is not None else None
    except ValueError:
        return None
    return None if seconds is None else min(max(seconds, 0.0), 60.0)
