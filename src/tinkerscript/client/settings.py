"""Who a client is and how patient. No I/O."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from functools import cache
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
