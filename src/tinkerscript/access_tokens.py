"""The server's secret, claim keys, and tokens of the two roles.

A claim's key is an HMAC of (episode, attempt) under the server's secret, so it survives a restart without
being stored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, cast
from urllib.parse import urlsplit

from starlette.types import Scope

from tinkerscript.asgi import is_loopback
from tinkerscript.config import InterchangeConfig
from tinkerscript.errors import ConfigError, NotTheOwnerError, UnauthorizedError
from tinkerscript.files import check_private
from tinkerscript.logs import now_about

KEY_PREFIX = "ts-"
CLIENT_TOKEN = "TINKERSCRIPT_CLIENT_TOKEN"
ADMIN_TOKEN = "TINKERSCRIPT_ADMIN_TOKEN"

FILE_SUFFIX = "_FILE"

# Child processes inherit them only if needed.
TOKEN_VARIABLES = frozenset(
    f"{name}{suffix}" for name in (ADMIN_TOKEN, CLIENT_TOKEN) for suffix in ("", FILE_SUFFIX)
)

MIN_TOKEN_CHARS = 16  # For addresses that other machines can reach.

_SECRET_BYTES = 32
_MAX_TOKEN_BYTES = 4096

# Fits 200 four-byte characters of an episode uuid.
_MAX_KEY_CHARS = 1200

_KEYS_REMEMBERED = 16_384

Role = Literal["client", "admin"]


class ClaimId(NamedTuple):
    episode_uuid: str
    attempt: int


def load_secret(path: Path) -> bytes:
    """Return the 32-byte secret in `path`, created with mode 0600 if missing.

    Raises ConfigError for other content, or a file that others own or can read.
    """
    if not path.exists():
        _make_secret(path)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        secret = file.read()
    check_private(path, status)
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} must contain {_SECRET_BYTES} bytes, not {len(secret)}; delete it to create a new one"
        )
    return secret


def _make_secret(path: Path) -> None:
    # The file is never half written, and the first of two servers wins.
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
    """Return `ts-<episode>.<attempt>.<mac>`, in base64url, decimal and base64url."""
    mac = _mac(secret, b"tinkerscript claim", episode_uuid, attempt)
    return f"{KEY_PREFIX}{_b64(episode_uuid.encode())}.{attempt}.{_b64(mac)}"


def _mac(secret: bytes, purpose: bytes, episode_uuid: str, attempt: int) -> bytes:
    keyed = _keyed(secret).copy()
    keyed.update(b"\0".join((purpose, episode_uuid.encode(), str(attempt).encode())))
    return keyed.digest()


@lru_cache(maxsize=8)
def _keyed(secret: bytes) -> hmac.HMAC:
    """Cached, because this takes half of an HMAC's time."""
    return hmac.new(secret, digestmod=hashlib.sha256)


def verify_key(secret: bytes, key: str) -> ClaimId | None:
    claim = _parse_key(key)
    if claim is None:
        return None
    expected = claim_key(secret, claim.episode_uuid, claim.attempt)
    return claim if hmac.compare_digest(expected.encode(), key.encode()) else None


def claim_alias(secret: bytes, episode_uuid: str, attempt: int) -> str:
    """Return `<episode>~<attempt>~<mac>`, an unguessable episode uuid for a client without a key."""
    mac = _mac(secret, b"tinkerscript alias", episode_uuid, attempt)
    return f"{episode_uuid}~{attempt}~{_b64(mac[:16])}"


def verify_alias(secret: bytes, alias: str) -> ClaimId | None:
    uuid, _, rest = alias.rpartition("~")[0].rpartition("~")
    if not uuid or not rest.isdecimal() or len(rest) > 9 or len(alias) > 1000:
        return None
    claim = ClaimId(uuid, int(rest))
    expected = claim_alias(secret, claim.episode_uuid, claim.attempt)
    return claim if hmac.compare_digest(expected.encode(), alias.encode()) else None


def _parse_key(key: str) -> ClaimId | None:
    parts = key.removeprefix(KEY_PREFIX).split(".")
    if not key.startswith(KEY_PREFIX) or len(parts) != 3 or len(key) > _MAX_KEY_CHARS or not key.isascii():
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
    """A role without a token admits everyone, as on a local server."""

    client_token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    accounts: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @staticmethod
    def of(section: InterchangeConfig, environ: Mapping[str, str], *, serve_model: bool = False) -> Roles:
        """Read the tokens from the environment or from files named there.

        A server that only serves a model gets a random admin token by default. Raises ConfigError for a
        required token that is missing, too short, or in a file that others can read.
        """
        client, admin = read_token(environ, CLIENT_TOKEN), read_token(environ, ADMIN_TOKEN)
        if serve_model and client is not None and admin is None:
            admin = secrets.token_hex()
        tokens = {CLIENT_TOKEN: client, ADMIN_TOKEN: admin}
        if setting := reached_through(section):
            _check_tokens(setting, tokens)
        if client is not None and admin is None:
            raise ConfigError(f"{CLIENT_TOKEN} is set and {ADMIN_TOKEN} is not; set both, or neither")
        if client is not None and client == admin:
            raise ConfigError(
                f"{CLIENT_TOKEN} and {ADMIN_TOKEN} are equal, so every client would be an admin"
            )
        return Roles(client, admin, _account_tokens(section, environ, client, admin))

    @property
    def are_open(self) -> bool:
        return self.client_token is None

    def check(self, role: Role, scope: Scope) -> None:
        self.require(role, authorization_of(scope))

    def account(self, scope: Scope) -> str:
        """The client's name, or "" for a shared token."""
        return self._account_of(authorization_of(scope)) if self.accounts else ""

    def _account_of(self, authorization: str) -> str:
        token = authorization.removeprefix("Bearer ").encode()
        # Comparing all tokens reveals nothing by timing.
        return next(iter([name for name, own in self.accounts.items() if _same(own, token)]), "")

    def grants(self, role: Role, authorization: str) -> bool:
        try:
            self.require(role, authorization)
        except UnauthorizedError:
            return False
        return True

    def require(self, role: Role, authorization: str) -> None:
        """Check an `Authorization` header. The admin token also grants the client role.

        Raises UnauthorizedError: 401 for a missing or wrong token, 403 for a client token on an admin route.
        """
        needed = self.client_token if role == "client" else self.admin_token
        if needed is None:
            return
        token = authorization.removeprefix("Bearer ").encode()
        is_admin = _same(self.admin_token, token)
        is_client = _same(self.client_token, token) or (
            not is_admin and bool(self._account_of(authorization))
        )
        if is_admin or (is_client and role == "client"):
            return
        if is_client:
            raise UnauthorizedError(403, f"this route needs the admin token ({ADMIN_TOKEN})")
        raise UnauthorizedError(401, f"this route needs the {role} token as 'Authorization: Bearer ...'")


def authorization_of(scope: Scope) -> str:
    values = (value for name, value in scope["headers"] if name == b"authorization")
    return next(values, b"").decode("latin-1")


CLAIM = "tinkerscript.claim"


class ClaimKeys:
    def __init__(self, secret: bytes, roles: Roles) -> None:
        self._secret = secret
        self._roles = roles
        # Least recently used first. Only valid keys, so attackers cannot displace them.
        self._opened: dict[str, ClaimId] = {}

    def key(self, episode_uuid: str, attempt: int) -> str:
        key = claim_key(self._secret, episode_uuid, attempt)
        self._remember(key, ClaimId(episode_uuid, attempt))
        return key

    def alias(self, episode_uuid: str, attempt: int) -> str | None:
        """Return a claim's alias, or None if clients need tokens."""
        return claim_alias(self._secret, episode_uuid, attempt) if self._roles.are_open else None

    def gateway(self, episode_uuid: str, attempt: int, *, of: int) -> int:
        """Return which gateway process, 1 to `of`, owns a claim.

        The secret decides, so a restart keeps the answer, and episode names cannot steer it.
        """
        digest = _mac(self._secret, b"tinkerscript gateway", episode_uuid, attempt)
        return int.from_bytes(digest[:8]) % of + 1

    def opened_by(self, key: str) -> ClaimId | None:
        claim = self._opened.get(key)
        if claim is None and (claim := verify_key(self._secret, key)) is not None:
            self._remember(key, claim)
        return claim

    def _remember(self, key: str, claim: ClaimId) -> None:
        self._opened[key] = claim
        if len(self._opened) > _KEYS_REMEMBERED:
            del self._opened[next(iter(self._opened))]

    def named(self, alias: str) -> ClaimId | None:
        return verify_alias(self._secret, alias)

    def authorize(self, scope: Scope) -> None:
        """Store the request's claim (None if clients need no token) in its scope.

        Raises UnauthorizedError 401 for a key without a claim, and 403 for a role's token.
        """
        authorization = authorization_of(scope)
        claim = self.opened_by(authorization.removeprefix("Bearer "))
        if claim is None and (authorization or not self._roles.are_open):
            if not self._roles.are_open and self._roles.grants("client", authorization):
                raise UnauthorizedError(403, f"a client token does not open a claim; {SEND_KEY}")
            raise UnauthorizedError(401, f"no claim of this server has this key; {SEND_KEY}")
        if claim is not None:
            now_about(episode=claim.episode_uuid, attempt=claim.attempt)
        scope[CLAIM] = claim

    def claim_of(self, scope: Scope, episode_uuid: str) -> ClaimId:
        """Return the request's claim. `episode_uuid` may be an alias or empty.

        Raises UnauthorizedError 401 without a key or alias, and NotTheOwnerError if they disagree.
        """
        opened: ClaimId | None = scope[CLAIM]
        if opened is not None and episode_uuid in ("", opened.episode_uuid):
            return opened
        named = self.named(episode_uuid)
        if opened is None and named is None:
            raise UnauthorizedError(401, f"the request names no claim; {SEND_KEY}")
        if opened is None or named == opened:
            return cast("ClaimId", named)
        raise NotTheOwnerError(
            f"the key is of claim {opened.attempt} of episode {opened.episode_uuid}, and the request names "
            f"episode {episode_uuid!r}"
        )


SEND_KEY = "send the claim's openai_api_key as 'Authorization: Bearer KEY'"


def read_token(environ: Mapping[str, str], name: str) -> str | None:
    """Return the token in `name`, or in the file that `<name>_FILE` names.

    Raises ConfigError if both are set, or for an empty file or one that others can read.
    """
    token, path = environ.get(name) or None, environ.get(f"{name}{FILE_SUFFIX}") or None
    if token is not None and path is not None:
        raise ConfigError(f"{name} and {name}{FILE_SUFFIX} are both set; set one of them")
    return token if path is None else _token_in(Path(path), f"{name}{FILE_SUFFIX}")


def _token_in(path: Path, variable: str) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_TOKEN_BYTES + 1)
        token = text.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable}: cannot read a token from {path}: {error}") from error
    check_private(path, status, prefix=f"{variable}: ")
    if not token or len(text) > _MAX_TOKEN_BYTES:
        raise ConfigError(f"{variable}: {path} must contain one token of 1 to {_MAX_TOKEN_BYTES} bytes")
    return token


def _check_tokens(setting: str, tokens: Mapping[str, str | None]) -> None:
    where = f"interchange_server.{setting} is reachable from other machines, so"
    missing = [name for name, token in tokens.items() if token is None]
    if missing:
        raise ConfigError(
            f"{where} {' and '.join(missing)} must be set in the environment to long random strings, or the "
            f"same with {FILE_SUFFIX} to the name of a file"
        )
    for name, token in tokens.items():
        if token is not None and len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"{where} {name} must have at least {MIN_TOKEN_CHARS} characters, not {len(token)}"
            )


def _account_tokens(
    section: InterchangeConfig, environ: Mapping[str, str], client: str | None, admin: str | None
) -> dict[str, str]:
    if section.clients and client is None:
        raise ConfigError(
            f"interchange_server.clients: set {CLIENT_TOKEN} and {ADMIN_TOKEN}; without them anyone may enter"
        )
    tokens, taken = dict[str, str](), {client, admin}
    for each in section.clients:
        where, variable = f"interchange_server.clients: {each.name}", each.token_env
        token = read_token(environ, variable)
        if token is None:
            raise ConfigError(
                f"{where}: no token; set {variable}, or {variable}{FILE_SUFFIX} to a file with it"
            )
        if len(token) < MIN_TOKEN_CHARS and reached_through(section):
            raise ConfigError(f"{where}: the token needs at least {MIN_TOKEN_CHARS} characters")
        if token in taken:
            raise ConfigError(f"{where}: the token is not unique")
        taken.add(token)
        tokens[each.name] = token
    return tokens


def _same(known: str | None, token: bytes) -> bool:
    return known is not None and hmac.compare_digest(known.encode(), token)


def reached_through(section: InterchangeConfig) -> str:
    public = urlsplit(section.public_base_url).hostname
    if not is_loopback(section.interchange_server_host):
        return f"interchange_server_host: {section.interchange_server_host!r}"
    if section.trusted_proxies:
        return f"trusted_proxies: a server behind {', '.join(section.trusted_proxies)}"
    if public is not None and not is_loopback(public):
        return f"public_base_url: {section.public_base_url!r}"
    return ""
