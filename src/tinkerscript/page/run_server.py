"""`RunServer`: the interchange server of a run that goes on, as the page sees it.

Invariant: what the page shows of it is asked for at most once a second, however many look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tinkerscript.errors import NotRecordedError
from tinkerscript.server.addresses import read_server_info

FRESH_S = 1.0
TIMEOUT_S = 5.0
CHAT_TIMEOUT_S = 120.0


class RunServer:
    """One run's server; it may come and go."""

    def __init__(self, folder: Path, admin_token: str | None) -> None:
        self._folder = folder
        headers = {"authorization": f"Bearer {admin_token}"} if admin_token else {}
        # The certificate names the server's public address, and this is the same machine.
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, verify=False, trust_env=False)
        self._asking = asyncio.Lock()
        self._fleet: tuple[float, dict[str, Any]] = (-FRESH_S, {})

    async def fleet(self) -> dict[str, Any]:
        """What `GET /fleet` answers. Raises NotRecordedError if no server answers."""
        async with self._asking:
            at, found = self._fleet
            if time.monotonic() - at >= FRESH_S:
                found = await self._ask("GET", "/fleet")
                self._fleet = time.monotonic(), found
            return found

    async def openapi(self) -> dict[str, Any]:
        """The OpenAPI description of its API. Raises NotRecordedError."""
        return await self._ask("GET", "/openapi.json")

    async def failed_episodes(self, action: str, uuids: list[str]) -> dict[str, Any]:
        """`retry` or `drop` episodes that failed. Raises NotRecordedError."""
        return await self._ask("POST", f"/failed_episodes/{action}", {"episode_uuids": uuids})

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A reply of the newest weights, which no claim records. Raises NotRecordedError."""
        return await self._ask("POST", "/try/v1/chat/completions", body, timeout_s=CHAT_TIMEOUT_S)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        info = read_server_info(self._folder)
        if info is None:
            raise NotRecordedError("this run has no server: its episodes run in the trainer's process")
        token = self._client.headers.get("authorization", "Bearer none")
        try:
            reply = await self._client.request(
                method, f"{info.url}{path}", json=body, timeout=timeout_s, headers={"authorization": token}
            )
        except httpx.HTTPError as error:
            raise NotRecordedError(f"the run's server at {info.url} does not answer: {error}") from error
        if reply.status_code >= 400:
            raise NotRecordedError(f"the run's server refuses: {_reason(reply)}")
        try:
            return reply.json()
        except ValueError as error:
            raise NotRecordedError(f"what answers at {info.url} is not the run's server: no JSON") from error

    async def close(self) -> None:
        await self._client.aclose()


class RunServers:
    """The servers of the runs that a page shows."""

    def __init__(self, admin_token: str | None) -> None:
        self._admin_token = admin_token
        self._servers: dict[Path, RunServer] = {}

    def of(self, folder: Path) -> RunServer:
        if folder not in self._servers:
            self._servers[folder] = RunServer(folder, self._admin_token)
        return self._servers[folder]

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


def _reason(reply: httpx.Response) -> str:
    try:
        body = reply.json()
    except ValueError:
        return f"status {reply.status_code}"
    if not isinstance(body, dict):
        return f"status {reply.status_code}: {body}"
    error: Any = body.get("error")
    words = error.get("message") if isinstance(error, dict) else error
    return str(body.get("failure_reason") or words or body)
