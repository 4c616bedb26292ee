"""`LinkGuard`: who may connect to a link that leaves this machine, and a note of everyone who may not.

Invariant: a connection that does not prove the trainer's key carries no message; it is counted and, now and
then, logged. CURVE proves the key, this says whether it is the right one (ZAP, RFC 27); the handshakes that
fail are seen by a socket monitor.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
import zmq.utils.z85
from zmq.utils.monitor import parse_monitor_message

from tinkerscript.server.link_keys import ServerKeys, TrainerKeys

logger = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"tinkerscript"
_LOG_EVERY_S = 60.0

_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "wrong_key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake",
}
"""Event of a socket -> the reason under which a refused connection is counted."""

_DETAILS = {
    "wrong_key": "a connection with a key that is not the other end's was refused",
    "handshake": "a connection without CURVE, or meant for another key, was refused",
}


class FailedHandshakes:
    """Watches a socket for connections that were refused, at either end of the link."""

    def __init__(self, socket: zmq.asyncio.Socket, address: str, count: Callable[[str], None]) -> None:
        """`count(reason)` is told of each."""
        events = 0
        for event in _FAILED:
            events |= event
        self._monitor = socket.get_monitor_socket(events)
        self._socket = socket
        self._address = address
        self._count = count
        self._logged_at: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    async def run(self) -> None:
        """Count and log, until cancelled."""
        while True:
            message = parse_monitor_message(await self._monitor.recv_multipart())
            reason = _FAILED.get(int(message["event"]))
            if reason is not None:
                self._count(reason)
                self._log(reason)

    def close(self) -> None:
        """Repeatable."""
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)

    def _log(self, reason: str) -> None:
        """At most one line a minute for each reason: who is refused tries again and again."""
        now = asyncio.get_running_loop().time()
        self._unsaid[reason] = self._unsaid.get(reason, 0) + 1
        if now - self._logged_at.get(reason, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            times = self._unsaid.pop(reason)
            self._logged_at[reason] = now
            logger.warning(
                "link.refused reason=%s address=%s times=%d detail=%s",
                *(reason, self._address, times, _DETAILS[reason]),
            )


class LinkGuard:
    """Makes a server's socket accept the trainer's key alone. `run` answers libzmq's questions."""

    def __init__(self, context: zmq.asyncio.Context, keys: ServerKeys) -> None:
        self._allowed = zmq.utils.z85.decode(keys.trainer_public)
        # Bound before the link is: without a handler libzmq would let every key in.
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)

    async def run(self) -> None:
        """Answer, until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            split = frames.index(b"") + 1
            envelope, request = frames[:split], frames[split:]
            status, text = (b"200", b"OK") if self._is_allowed(request) else (b"400", b"No such key")
            answer = [b"1.0", request[1], status, text, b"", b""]
            await self._socket.send_multipart([*envelope, *answer])

    def _is_allowed(self, request: list[bytes]) -> bool:
        """`request` is version, id, domain, address, identity, mechanism, credentials."""
        if len(request) != 7:
            return False
        _, _, domain, _, _, mechanism, key = request
        return domain == _DOMAIN and mechanism == b"CURVE" and hmac.compare_digest(key, self._allowed)

    def close(self) -> None:
        """Repeatable."""
        self._socket.close(linger=0)


def secure_server(socket: zmq.asyncio.Socket, keys: ServerKeys) -> None:
    """Refuse every connection that does not speak CURVE. A `LinkGuard` of the same context must exist."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def secure_trainer(socket: zmq.asyncio.Socket, keys: TrainerKeys) -> None:
    """Speak to no server but the one whose public key is known."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
