"""`Runs` are the runs that a page shows, with the servers of those in progress.

We only ask this user's servers on this machine: a foreign run folder could name any address, which would
receive the admin token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tinkerscript.addresses import SERVER_FILE, ServerInfo, read_server_info
from tinkerscript.asgi import is_loopback
from tinkerscript.errors import ConfigError, ConflictError, NotRecordedError
from tinkerscript.files import LATEST_RUN
from tinkerscript.ledger.reader import LedgerReader, find_runs
from tinkerscript.lifecycle import try_lock
from tinkerscript.page.overview import state
from tinkerscript.page.search_index import SearchIndex

FRESH_S = 1.0

SERVER_TIMEOUT_S = 15.0
"""Long, because the low-priority page may read a reply late."""

LOOK_AGAIN_S = 2.0


class Runs:
    """The run in a folder, or the runs below it. Thread-safe."""

    def __init__(self, root: Path, admin_token: str | None = None) -> None:
        self.root = root
        self._admin_token = admin_token
        self._servers: dict[Path, RunServer] = {}
        self._ledgers: dict[str, LedgerReader] = {}
        self._folders: dict[str, Path] = {}
        self._looked = -LOOK_AGAIN_S
        self._lock = threading.Lock()

    def folders(self) -> dict[str, Path]:
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= LOOK_AGAIN_S:
                self._looked = now
                try:
                    self._folders = find_runs(self.root)
                except ConfigError:
                    self._folders = {}
            return self._folders

    def ledger(self, name: str) -> LedgerReader:
        folder = self.folders().get(name)
        if folder is None:
            known = ", ".join(list(self._folders)[:10])
            there = f"the runs here are {known}" if known else "a run is shown where its ledger is"
            raise NotRecordedError(f"there is no run {name!r} here; {there}")
        with self._lock:
            if name not in self._ledgers:
                self._ledgers[name] = LedgerReader(folder)
            return self._ledgers[name]

    def readable(self) -> dict[str, LedgerReader]:
        found: dict[str, LedgerReader] = {}
        for name in self.folders():
            with suppress(ConfigError):
                found[name] = self.ledger(name)
        return found

    def ledger_of(self, episode_uuid: str) -> tuple[str, LedgerReader]:
        for name, ledger in self.readable().items():
            if ledger.number("SELECT sequence FROM episodes WHERE uuid = ?", (episode_uuid,)) is not None:
                return name, ledger
        raise NotRecordedError(f"no run here has an episode {episode_uuid!r} that ended")

    def delete(self, name: str) -> None:
        """Raises OSError, and ConflictError for a run in progress."""
        ledger = self.ledger(name)
        folder = ledger.folder
        if folder.parent != self.root or folder.is_symlink():
            raise ConflictError(
                f"this page shows only {name}; use `tinkerscript view {folder.parent}` to delete it"
            )
        if state(ledger.status()) == "running":
            raise ConflictError(f"{name} is running; stop it first")
        with ExitStack() as held:
            for path in (folder / "trainer.lock", folder / "server.lock"):
                if path.is_symlink() or not path.is_file():  # Not our lock; locking would write to it.
                    continue
                if (lock := try_lock(path)) is None:
                    raise ConflictError(f"a {path.stem} is running in {folder}; stop it first")
                held.enter_context(lock)
            # The rename removes the whole run, or loses nothing.
            gone = folder.rename(folder.with_name(f".deleted-{name}"))
            with self._lock:
                self._ledgers.pop(name, None)
                self._looked = -LOOK_AGAIN_S
            SearchIndex.forget(folder)
            shutil.rmtree(gone)
        latest = self.root / LATEST_RUN
        if latest.is_symlink() and not latest.exists():
            latest.unlink()

    def server_of(self, folder: Path) -> RunServer:
        if folder not in self._servers:
            self._servers[folder] = RunServer(folder, self._admin_token)
        return self._servers[folder]

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


class RunServer:
    def __init__(self, folder: Path, admin_token: str | None) -> None:
        self._folder = folder
        self._headers = {"authorization": f"Bearer {admin_token or 'none'}"}
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._asking = asyncio.Lock()
        self._fleet: tuple[float, dict[str, Any]] = (-FRESH_S, {})

    async def fleet(self) -> dict[str, Any]:
        async with self._asking:
            at, found = self._fleet
            if time.monotonic() - at >= FRESH_S:
                found = await self._ask("GET", "/fleet")
                self._fleet = time.monotonic(), found
            return found

    async def failed_episodes(self, action: str, uuids: list[str]) -> dict[str, Any]:
        return await self._ask("POST", f"/failed_episodes/{action}", {"episode_uuids": uuids})

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        info = read_server_info(self._folder)
        if info is None:
            raise NotRecordedError("this run has no server: its episodes run in the trainer's process")
        await asyncio.to_thread(_check_own, self._folder, info)
        try:
            reply = await self._client(info.certificate).request(
                method, f"{info.url}{path}", json=body, headers=self._headers
            )
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise NotRecordedError(f"the run's server at {info.url} does not answer: {reason}") from error
        if reply.status_code >= 400:
            raise NotRecordedError(f"the run's server refuses: {_reason(reply)}")
        try:
            return reply.json()
        except ValueError as error:
            raise NotRecordedError(f"{info.url} is not the run's server: its reply is not JSON") from error

    def _client(self, certificate: str) -> httpx.AsyncClient:
        if certificate not in self._clients:
            verify: ssl.SSLContext | bool = True
            if certificate:
                try:
                    verify = ssl.create_default_context(cafile=certificate)
                except (OSError, ssl.SSLError) as error:
                    raise NotRecordedError(f"the run's certificate {certificate}: {error}") from error
                # The certificate names the public address, and may not be its own root.
                verify.check_hostname = False
                verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            self._clients[certificate] = httpx.AsyncClient(
                timeout=SERVER_TIMEOUT_S, verify=verify, trust_env=False
            )
        return self._clients[certificate]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _check_own(folder: Path, info: ServerInfo) -> None:
    us = os.geteuid()
    for path in (folder, folder / SERVER_FILE):
        if path.stat().st_uid != us:
            raise NotRecordedError(f"{path} belongs to another user; this page does not contact its server")
    host = urlsplit(info.url).hostname or ""
    if not is_loopback(host) and not _is_of_this_machine(host):
        raise NotRecordedError(
            f"this run's server is on another machine ({info.url}), so this page does not contact it"
        )
    try:
        os.kill(info.pid, 0)
    except (ProcessLookupError, PermissionError):  # Another program may have its port.
        raise NotRecordedError(f"this run's server (process {info.pid}) has ended") from None


def _is_of_this_machine(host: str) -> bool:
    # Only this machine's addresses can be bound.
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((str(ipaddress.ip_address(host)), 0))
    except (OSError, ValueError):
        return False
    return True


def _reason(reply: httpx.Response) -> str:
    try:
        body = reply.json()
    except ValueError:
        return f"status {reply.status_code}"
    if not isinstance(body, dict):
        return f"status {reply.status_code}: {body}"
    return str(body.get("failure_reason") or body)
