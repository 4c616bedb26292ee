"""Who a client is and how patient. No I/O.

What the environment says about the server: its URL and the client's token.

TINKERSCRIPT_SERVER_URL, and TINKERSCRIPT_CLIENT_TOKEN or TINKERSCRIPT_CLIENT_TOKEN_FILE: the path of a file
that holds the token, such as a mounted secret. The token itself wins. Tokens are never logged.
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

DEFAULT_TIMEOUT_S = 300.0
"""Seconds that an operation goes on while the server cannot be reached."""


LAST_WORDS_S = 5.0
"""Seconds that an episode's last request may take when its program is being stopped."""


@cache
def _certificates() -> ssl.SSLContext:
    """The machine's certificates, read once: it takes tens of milliseconds."""
    return ssl.create_default_context()


@cache
def _nobody() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Who the client is and how patient."""

    server_url: str
    client_uuid: str
    token: str | None = field(default=None, repr=False)
    """Token of the client role; None where the server asks for none."""

    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Seconds that an operation goes on while the server cannot be reached. None: for ever."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without activity after which a claim lapses."""

    def __post_init__(self) -> None:
        if not self.server_url.startswith(("http://", "https://")):
            raise ValueError(f"server_url must start with http:// or https://, got {self.server_url!r}")

    @property
    def pool(self) -> str:
        """The pool of this client's own episodes."""
        return self.client_uuid

    def tls(self) -> ssl.SSLContext:
        """What verifies the server. An http:// URL needs none and gets one that trusts nobody."""
        return _certificates() if self.server_url.startswith("https://") else _nobody()

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {self.token}"} if self.token else headers


def make_settings(
    server_url: str,
    client_uuid: str | None,
    token: str | None,
    timeout_s: float | None,
    allow_discard_timeout: float,
) -> ClientSettings:
    """Settings with a client uuid of their own where none was given. Raises ValueError for a bad URL."""
    return ClientSettings(
        server_url.rstrip("/"), client_uuid or uuid4().hex, token, timeout_s, allow_discard_timeout
    )


SERVER_URL = "TINKERSCRIPT_SERVER_URL"


TOKEN = "TINKERSCRIPT_CLIENT_TOKEN"


TOKEN_FILE = "TINKERSCRIPT_CLIENT_TOKEN_FILE"


DEFAULT_SERVER_URL = "http://127.0.0.1:10086"


def server_url(environ: Mapping[str, str] = os.environ) -> str:
    """The server's URL."""
    return environ.get(SERVER_URL) or DEFAULT_SERVER_URL


def client_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The client's token; None if the environment names none.

    Raises ValueError for a token file that cannot be read, or is empty.
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
