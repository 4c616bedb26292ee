"""Access control for the page (`PageAccess`), and the audit log of changes.

With an admin token, all but the login form needs it or its cookie. Without one, requests must have a loopback
name, so that other sites cannot reach the page.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerscript.asgi import problem_with_site

AUDIT_FILE = "audit.jsonl"

COOKIE = "tinkerscript_session_"
"""Cookies ignore ports, so each run on a host needs its own name."""

SESSION_S = 30 * 24 * 3600
OPEN_PATHS = frozenset({"/", "/favicon.ico", "/api/login", "/api/session"})

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
)
"""Nothing from other hosts and no scripts but ours."""

HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "SAMEORIGIN",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


logger = logging.getLogger(__name__)


class PageSessions:
    def __init__(self, admin_token: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self._token = admin_token
        self._clock = clock
        # A random secret would end all sessions at a restart.
        self._secret = hashlib.sha256(b"tinkerscript page " + (admin_token or "").encode()).digest()
        self.cookie_name = COOKIE + hashlib.sha256(b"cookie " + self._secret).hexdigest()[:12]

    @property
    def are_needed(self) -> bool:
        return self._token is not None

    def admits(self, token: str) -> bool:
        return self._token is None or hmac.compare_digest(token.encode(), self._token.encode())

    def cookie(self) -> str:
        expires = f"{int(self._clock()) + SESSION_S}.{secrets.token_urlsafe(8)}"
        return f"{expires}.{self._mac(expires)}"

    def is_valid(self, cookie: str) -> bool:
        expires, _, mac = cookie.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(expires).encode()):
            return False
        return float(expires.partition(".")[0]) > self._clock()

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def may_enter(self, headers: Headers) -> bool:
        if not self.are_needed:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.admits(token.strip()):
            return True
        return self.is_valid(_cookie(headers.get("cookie", ""), self.cookie_name))


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


class PageAccess:
    def __init__(self, app: ASGIApp, *, sessions: PageSessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))

        async def confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refusal or self._app)(scope, receive, confined)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        if problem := problem_with_site(request.scope, any_host=self._sessions.are_needed):
            return _refused(403, problem)
        path = request.url.path
        is_open = path in OPEN_PATHS or path.startswith("/page/")
        if not is_open and not self._sessions.may_enter(headers):
            return _refused(401, "log in with the admin token, or send it as 'Authorization: Bearer ...'")
        return None


def write_audit(
    folder: Path, request: Request, action: str, details: Mapping[str, object] | None = None
) -> None:
    who = request.client.host if request.client else ""
    entry = {"time": time.time(), "from": who, "action": action}
    line = json.dumps({**entry, **(details or {})})
    # A foreign folder may have a link or a pipe here.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(folder / AUDIT_FILE, flags, 0o666), "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    logger.info("page.action %s", line)


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """Return the latest actions, newest first."""
    path = folder / AUDIT_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in reversed(lines[-1000:])]


def _refused(status: int, reason: str) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"success": False, "failure_reason": reason}, status, headers)
