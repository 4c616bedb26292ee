"""Chat completions over one pool of connections that a worker process shares.

Invariant: a lost claim raises at once; a busy or restarting server is waited for, with a bound; everything
else that the server refuses raises with the server's own words. aiohttp comes with inspect_ai, and a request
costs it a fraction of httpx's CPU time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tinkerscript.errors import ClaimLostError, RequestRefusedError, ServerUnreachableError

_BUSY = (429, 503)


@dataclass(frozen=True)
class RetryPolicy:
    """How long a model call is tried for."""

    attempts: int = 6
    """Attempts that may fail by a server error or a lost connection."""

    first_delay_s: float = 0.25
    """Delay after the first failure; it doubles each time, up to `max_delay_s`, and is jittered by half."""

    max_delay_s: float = 8.0
    max_busy_s: float = 600.0
    """Seconds that one call may wait in all on `Retry-After` of 429 and 503."""


class ChatEndpoint:
    """Posts model calls. Opened by its first call; close it with `aclose`. Belongs to one event loop."""

    def __init__(
        self,
        *,
        connections: int = 512,
        call_timeout_s: float = 900.0,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`call_timeout_s` bounds one attempt; `sleep` is replaced in tests."""
        self._connections = connections
        self._timeout = aiohttp.ClientTimeout(total=call_timeout_s, sock_connect=30.0)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, base_url: str, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
        """The completion for a request body, from `{base_url}/chat/completions`.

        Raises ClaimLostError (409 claim_lost), RequestRefusedError for another refusal, and
        ServerUnreachableError when the attempts or the time for waiting are used up.
        """
        url = f"{base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        data = json.dumps(body, separators=(",", ":")).encode()
        failures, waited = 0, 0.0
        while True:
            status, reply, retry_after = await self._post(url, data, headers)
            if status == 200:
                return json.loads(reply)
            if status in _BUSY and retry_after is not None and waited < self._retry.max_busy_s:
                waited += retry_after
                await self._sleep(retry_after)
                continue
            failures += 1
            _raise_refusal(status, reply)
            if failures >= self._retry.attempts:
                raise ServerUnreachableError(
                    f"{url}: {failures} attempts failed, the last one: {_words(reply)}"
                )
            await self._sleep(self._delay(failures))

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, url: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes, float | None]:
        """Status, body and seconds of Retry-After; status 0 and the reason if the connection failed."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                return response.status, await response.read(), _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}".encode(), None

    def _delay(self, failures: int) -> float:
        delay = min(self._retry.first_delay_s * 2 ** (failures - 1), self._retry.max_delay_s)
        return delay * random.uniform(0.5, 1.5)


def _raise_refusal(status: int, reply: bytes) -> None:
    """Raise for what a repetition cannot change."""
    if status == 0 or status == 429 or status >= 500:
        return
    if status == 409 and _error(reply).get("code") == "claim_lost":
        raise ClaimLostError(_words(reply))
    raise RequestRefusedError(status, _words(reply))


def _error(reply: bytes) -> dict[str, Any]:
    try:
        error = json.loads(reply)["error"]
    except (ValueError, TypeError, KeyError):
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _words(reply: bytes) -> str:
    return str(_error(reply).get("message") or reply.decode(errors="replace")[:500])


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header) if header is not None else None
    except ValueError:
        return None
    return None if seconds is None else min(max(seconds, 0.0), 60.0)
