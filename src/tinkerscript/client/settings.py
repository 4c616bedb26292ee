"""Which server a client talks to, as whom, and how long it retries. No I/O beyond reading a token file.

The environment gives the server's URL, TINKERSCRIPT_SERVER_URL, and the client's token:
TINKERSCRIPT_CLIENT_TOKEN, or TINKERSCRIPT_CLIENT_TOKEN_FILE, the path of a file that holds it, such as a
mounted secret. TINKERSCRIPT_CLIENT_TOKEN takes precedence. Tokens are never logged.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from uuid import uuid4

from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S

SERVER_URL = "TINKERSCRIPT_SERVER_URL"
TOKEN = "TINKERSCRIPT_CLIENT_TOKEN"
TOKEN_FILE = "TINKERSCRIPT_CLIENT_TOKEN_FILE"

DEFAULT_SERVER_URL = "http://127.0.0.1:10086"
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Which server a client talks to, as whom, and how long it retries."""

    server_url: str
    client_uuid: str
    token: str | None = field(default=None, repr=False)
    """Token of the client role; None where the server asks for none."""

    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Seconds for which an operation is retried while the server is unreachable. None: no limit."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without activity after which a claim's lease expires."""

    def __post_init__(self) -> None:
        if not self.server_url.startswith(("http://", "https://")):
            raise ValueError(f"server_url must start with http:// or https://, got {self.server_url!r}")

    @property
    def pool(self) -> str:
        """The pool of this client's own episodes."""
        return self.client_uuid

    def tls(self) -> ssl.SSLContext:
        """The context that verifies the server; for http://, one that trusts nothing."""
        return _certificates() if self.server_url.startswith("https://") else _no_certificates()

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Content-Type": "application/json"} | bearer(self.token)


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a token or a key; none for None and for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def make_settings(
    server_url: str,
    client_uuid: str | None = None,
    token: str | None = None,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
) -> ClientSettings:
    """Settings, with a new `client_uuid` if none is given. Raises ValueError for a bad URL."""
    return ClientSettings(
        server_url.rstrip("/"), client_uuid or uuid4().hex, token, timeout_s, allow_discard_timeout
    )


def settings_from_env(environ: Mapping[str, str] = os.environ) -> ClientSettings:
    """The settings that the environment gives. Raises ValueError for a bad URL or token file."""
    return make_settings(environ.get(SERVER_URL) or DEFAULT_SERVER_URL, token=client_token(environ))


def client_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The client's token; None if the environment names none.

    Raises ValueError for a token file that is empty or cannot be read.
    """
    path = environ.get(TOKEN_FILE)
    if (token := environ.get(TOKEN)) or not path:
        return token or None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{TOKEN_FILE}: cannot read {path}: {error}") from error
    if not token:
        raise ValueError(f"{TOKEN_FILE}: {path} is empty; write the server's client token into it")
    return token


@cache
def _certificates() -> ssl.SSLContext:
    """The machine's certificates, read once: it takes tens of milliseconds."""
    return ssl.create_default_context()


@cache
def _no_certificates() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
