"""`ClientSettings`: a client's server, identity, timeouts and connections. Tokens are never logged."""

from __future__ import annotations

import ipaddress
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx

from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S, SERVER_URL

TOKEN = "TINKERSCRIPT_CLIENT_TOKEN"
CA_FILE = "TINKERSCRIPT_CA_FILE"

DEFAULT_SERVER_URL = "http://127.0.0.1:10086"
LATEST = Path("runs/latest")  # The newest run in the working directory.
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    server_url: str
    client_uuid: str
    token: str | None = field(default=None, repr=False)
    """None if the server requires none."""

    timeout_s: float | None = DEFAULT_TIMEOUT_S
    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    ca_file: str | None = None
    """PEM file with certificates, in addition to the machine's."""

    def __post_init__(self) -> None:
        checked_url(self.server_url)

    @property
    def pool(self) -> str:
        return self.client_uuid

    def tls(self) -> ssl.SSLContext:
        if not self.server_url.startswith("https://"):
            # Loading certificates takes time.
            return _no_certificates()
        try:
            return certificates(self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"ca_file: cannot read certificates from {self.ca_file}: {error}") from error

    def connections(self) -> dict[str, Any]:
        return {
            "base_url": self.server_url,
            "headers": self.headers(),
            "verify": self.tls(),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        }

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {self.token}"} if self.token else headers


def checked_url(url: str) -> str:
    url = url.strip().rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"server_url must start with http:// or https://, got {url!r}")
    return url


def url_of_run(folder: Path) -> str:
    """Read the server's URL from `server.json`.

    Raises ValueError if no server runs, and for another user's file, whose server should not get the token.
    """
    path = folder / "server.json"
    try:
        said: Any = json.loads(path.read_bytes())
        url, pid, owner = str(said["url"]), int(said["pid"]), path.stat().st_uid
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has had no interchange server (no {path.name})") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
    if owner != os.geteuid() or not _is_loopback(url):
        raise ValueError(f"{path} names {url}; give that URL itself if you trust it")
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        raise ValueError(f"the interchange server of {folder} does not run") from error
    return url


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_server_url() -> str:
    """Raises ValueError if the newest run here has no server: another run may have the default port."""
    if not LATEST.exists():
        return DEFAULT_SERVER_URL
    try:
        return url_of_run(LATEST)
    except ValueError as error:
        raise ValueError(f"{error}; name another with --server") from error


def make_settings(
    server_url: str,
    client_uuid: str | None = None,
    token: str | None = None,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    ca_file: str | None = None,
) -> ClientSettings:
    return ClientSettings(
        checked_url(server_url),
        client_uuid or uuid4().hex,
        client_token() if token is None else token,
        timeout_s,
        allow_discard_timeout,
        ca_file or os.environ.get(CA_FILE) or None,
    )


def settings_from_env(environ: Mapping[str, str] = os.environ) -> ClientSettings:
    return make_settings(environ.get(SERVER_URL) or DEFAULT_SERVER_URL, token=client_token(environ))


def client_token(environ: Mapping[str, str] = os.environ) -> str | None:
    return role_token(TOKEN, environ)


def role_token(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the token in the variable `name`, or in the file named by `<name>_FILE`.

    Raises ValueError for a token file that is empty or cannot be read.
    """
    path = environ.get(f"{name}_FILE")
    if (token := environ.get(name)) or not path:
        return token or None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}_FILE: cannot read {path}: {error}") from error
    if not token:
        raise ValueError(f"{name}_FILE: {path} is empty; write the server's token into it")
    return token


@cache
def certificates(ca_file: str | None) -> ssl.SSLContext:
    # Cached, because this takes tens of milliseconds.
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


@cache
def _no_certificates() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
