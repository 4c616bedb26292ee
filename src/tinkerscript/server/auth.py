"""Who may do what: the server's secret, the key of one claim, and the tokens of the two roles.

Invariant: a claim's key is an HMAC of (episode, attempt) under the server's secret. It can be derived again
after a restart, is stored nowhere, is compared in constant time and never logged.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from starlette.types import Scope

from tinkerscript.errors import ConfigError, UnauthorizedError

KEY_PREFIX = "ts-"
CLIENT_TOKEN = "TINKERSCRIPT_CLIENT_TOKEN"
ADMIN_TOKEN = "TINKERSCRIPT_ADMIN_TOKEN"

_SECRET_BYTES = 32

Role = Literal["client", "admin"]


class ClaimId(NamedTuple):
    """What a key names."""

    episode_uuid: str
    attempt: int


def load_secret(path: Path) -> bytes:
    """The secret of 32 bytes in `path`, made on first use with mode 0600.

    Raises ConfigError for a file that another user owns or reads, or that holds something else.
    """
    if not path.exists():
        _make_secret(path)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        secret = file.read()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{path} must be owned by this user and readable by nobody else (chmod 600)")
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} must hold {_SECRET_BYTES} bytes, not {len(secret)}: delete it to make a new one"
        )
    return secret


def _make_secret(path: Path) -> None:
    """Write beside and link: the file is never seen half written, and the first of two servers wins."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink()


def claim_key(secret: bytes, episode_uuid: str, attempt: int) -> str:
    """The API key of one claim: `ts-<episode>.<attempt>.<mac>`, the parts base64url, decimal, base64url."""
    message = b"\0".join((b"tinkerscript claim", episode_uuid.encode(), str(attempt).encode()))
    mac = hmac.digest(secret, message, hashlib.sha256)
    return f"{KEY_PREFIX}{_b64(episode_uuid.encode())}.{attempt}.{_b64(mac)}"


def verify_key(secret: bytes, key: str) -> ClaimId | None:
    """What `key` opens, or None if this server did not make it."""
    claim = _parse_key(key)
    if claim is None:
        return None
    expected = claim_key(secret, claim.episode_uuid, claim.attempt)
    return claim if hmac.compare_digest(expected.encode(), key.encode()) else None


def _parse_key(key: str) -> ClaimId | None:
    parts = key.removeprefix(KEY_PREFIX).split(".")
    if not key.startswith(KEY_PREFIX) or len(parts) != 3 or len(key) > 1000 or not key.isascii():
        return None
    name, attempt, _ = parts
    if not attempt.isdecimal() or len(attempt) > 9:
        return None
    try:
        return ClaimId(base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode(), int(attempt))
    except (binascii.Error, UnicodeDecodeError):
        return None


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass(frozen=True, slots=True)
class Roles:
    """The tokens of the two roles. None: the role is open, which only a loopback address may be."""

    client_token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)

    @staticmethod
    def for_host(host: str, environ: Mapping[str, str]) -> Roles:
        """The roles of a server that binds `host`. Raises ConfigError if a token is needed and missing."""
        client, admin = environ.get(CLIENT_TOKEN) or None, environ.get(ADMIN_TOKEN) or None
        missing = [name for name, token in ((CLIENT_TOKEN, client), (ADMIN_TOKEN, admin)) if token is None]
        if missing and not is_loopback(host):
            raise ConfigError(
                f"interchange_server.interchange_server_host: {host!r} can be reached from other machines, "
                f"so {' and '.join(missing)} must be set in the environment (long random strings)"
            )
        if client is not None and admin is None:
            raise ConfigError(f"{CLIENT_TOKEN} is set and {ADMIN_TOKEN} is not: set both, or neither")
        return Roles(client, admin)

    def check(self, role: Role, scope: Scope) -> None:
        """Check the `Authorization` header of an HTTP request. Raises what `require` raises."""
        values = (value for name, value in scope["headers"] if name == b"authorization")
        self.require(role, next(values, b"").decode("latin-1"))

    def require(self, role: Role, authorization: str) -> None:
        """Check an `Authorization` header. The admin token opens the client's routes too.

        Raises UnauthorizedError: 401 for no token or a wrong one, 403 for the client's on an admin route.
        """
        needed = self.client_token if role == "client" else self.admin_token
        if needed is None:
            return
        token = authorization.removeprefix("Bearer ").encode()
        is_admin = _same(self.admin_token, token)
        is_client = _same(self.client_token, token)
        if is_admin or (is_client and role == "client"):
            return
        if is_client:
            raise UnauthorizedError(403, f"this route needs the admin's token ({ADMIN_TOKEN})")
        raise UnauthorizedError(401, f"this route needs the {role}'s token as 'Authorization: Bearer ...'")


def _same(known: str | None, token: bytes) -> bool:
    return known is not None and hmac.compare_digest(known.encode(), token)


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
