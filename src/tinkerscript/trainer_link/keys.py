"""Keys of a link that leaves this machine (CURVE), and the check of connections.

The run folder has a pair for each end, as ZeroMQ certificates. CURVE proves a key, `LinkGuard` admits only
the trainer's (ZAP, RFC 27), and a socket monitor reports failed handshakes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.utils.z85
from zmq.utils.monitor import parse_monitor_message

from tinkerscript.errors import ConfigError
from tinkerscript.files import check_private

KEYS_DIR = "link_keys"

SERVER_KEYS = "server"
TRAINER_KEYS = "trainer"

_FILES = tuple(f"{name}.{kind}" for name in (SERVER_KEYS, TRAINER_KEYS) for kind in ("key", "key_secret"))

logger = logging.getLogger(__name__)

_REMEDY = f"copy the folder {KEYS_DIR!r} of the server's run folder, or delete it there to create a new one"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Each key is 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    trainer_public: bytes  # The only key that may connect.


@dataclass(frozen=True, slots=True)
class TrainerKeys:
    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes  # The only trusted server.


def make_link_keys(folder: Path) -> None:
    """Do nothing if `folder` exists."""
    if folder.exists():
        return
    try:
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))  # 0700
        try:
            for name in (SERVER_KEYS, TRAINER_KEYS):
                for path in zmq.auth.create_certificates(draft, name):
                    Path(path).chmod(0o600)
            if not folder.exists():
                draft.rename(folder)
        except OSError:
            if not folder.exists():  # Otherwise another process was first.
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot create the link's keys in {folder}: {error}") from error


def pack_link_keys(folder: Path) -> bytes:
    load_server_keys(folder)
    return msgspec.json.encode({name: (folder / name).read_text() for name in _FILES})


def unpack_link_keys(folder: Path, packed: bytes) -> None:
    for name, text in msgspec.json.decode(packed, type=dict[str, str]).items():
        if name in _FILES:
            (folder / name).write_text(text)  # Keeps the file's mode.


def load_server_keys(folder: Path) -> ServerKeys:
    public, secret = _pair(folder, SERVER_KEYS)
    return ServerKeys(public, secret, _public(folder, TRAINER_KEYS))


def load_trainer_keys(folder: Path) -> TrainerKeys:
    public, secret = _pair(folder, TRAINER_KEYS)
    return TrainerKeys(public, secret, _public(folder, SERVER_KEYS))


def _pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _read(path)
    check_private(path, path.stat())
    if secret is None:
        raise ConfigError(f"{path} contains no secret key; {_REMEDY}")
    return public, secret


def _public(folder: Path, name: str) -> bytes:
    return _read(folder / f"{name}.key")[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None:
                zmq.curve_public(key)  # Raises for a malformed key.
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{path} contains no key of the link ({error}); {_REMEDY}") from error
    return public, secret


_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"tinkerscript"
_LOG_EVERY_S = 60.0

_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "wrong_key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake",
}

_DETAILS = {
    "wrong_key": "a connection with the wrong key was refused",
    "handshake": "a connection without CURVE, or for another server key, was refused",
}


class FailedHandshakes:
    def __init__(self, socket: zmq.asyncio.Socket, address: str, count: Callable[[str], None]) -> None:
        events = 0
        for event in _FAILED:
            events |= event
        self._monitor = socket.get_monitor_socket(events)
        self._socket = socket
        self._address = address
        self._count = count
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            message = parse_monitor_message(await self._monitor.recv_multipart())
            reason = _FAILED.get(int(message["event"]))
            if reason is not None:
                self._count(reason)
                self._log(reason)

    def close(self) -> None:
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)

    def _log(self, reason: str) -> None:
        # At most once a minute, because a refused peer keeps retrying.
        now = asyncio.get_running_loop().time()
        self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
        if now - self._logged_at.get(reason, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            times = self._unlogged.pop(reason)
            self._logged_at[reason] = now
            logger.warning(
                "link.refused reason=%s address=%s times=%d detail=%s",
                *(reason, self._address, times, _DETAILS[reason]),
            )


class LinkGuard:
    """Answers libzmq's ZAP requests, admitting only the trainer's key."""

    def __init__(self, context: zmq.asyncio.Context, keys: ServerKeys) -> None:
        self._allowed = zmq.utils.z85.decode(keys.trainer_public)
        # Bound before the link, because without a handler libzmq accepts every key.
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)

    async def run(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            split = frames.index(b"") + 1
            envelope, request = frames[:split], frames[split:]
            status, text = (b"200", b"OK") if self._is_allowed(request) else (b"400", b"No such key")
            answer = [b"1.0", request[1], status, text, b"", b""]
            await self._socket.send_multipart([*envelope, *answer])

    def _is_allowed(self, request: list[bytes]) -> bool:
        # Version, id, domain, address, identity, mechanism, credentials.
        if len(request) != 7:
            return False
        _, _, domain, _, _, mechanism, key = request
        return domain == _DOMAIN and mechanism == b"CURVE" and hmac.compare_digest(key, self._allowed)

    def close(self) -> None:
        self._socket.close(linger=0)


def secure_server(socket: zmq.asyncio.Socket, keys: ServerKeys) -> None:
    """Needs a `LinkGuard` in the context."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def secure_trainer(socket: zmq.asyncio.Socket, keys: TrainerKeys) -> None:
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
