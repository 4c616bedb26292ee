"""The server's HTTP socket, its link, and `server.json` with both addresses."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from tinkerscript.config import DEFAULT_PORT, InterchangeConfig
from tinkerscript.errors import ConfigError
from tinkerscript.trainer_link.keys import KEYS_DIR, ServerKeys, load_server_keys, make_link_keys
from tinkerscript.trainer_link.server_end import ServerLink

SERVER_FILE = "server.json"

PAGE_PORT = 10085  # Gateway processes use the ports after 10086.
ADAPTERS_FOLDER = "adapters"
BACKLOG = 2048
MAX_IPC_BYTES = 100  # The kernel allows 107.


class ServerInfo(msgspec.Struct, frozen=True):
    url: str
    link_address: str
    pid: int
    server_id: str
    link_keys: str = ""
    certificate: str = ""
    gateway_ports: tuple[int, ...] = ()  # Empty if the server answers model calls itself.


def read_server_info(run_dir: Path) -> ServerInfo | None:
    try:
        return msgspec.json.decode((run_dir / SERVER_FILE).read_bytes(), type=ServerInfo)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def bind_http(config: InterchangeConfig, previous: ServerInfo | None) -> socket.socket:
    """Listen for HTTP requests.

    Ports 0 and `auto` prefer the former port, and `auto` then `DEFAULT_PORT`. If it is in use, they take a
    free port, except for `auto` with a `public_base_url`, which clients know.
    """
    host, port = config.interchange_server_host, config.interchange_server_port
    former = _port_of(previous.url) if previous is not None else 0
    wanted = (former or DEFAULT_PORT) if port == "auto" else port or former
    is_fixed = config.public_base_url if port == "auto" else port
    try:
        return listen(host, wanted) if is_fixed else listen_near(host, wanted)
    except OSError as error:
        raise ConfigError(_explain(config, wanted, error)) from error


@contextmanager
def bind_gateways(
    config: InterchangeConfig, number: int, port: int, previous: ServerInfo | None
) -> Generator[list[socket.socket]]:
    """Yield `number` listening sockets.

    They take their former ports, or at first the ones after `port`. Without a `public_base_url`, free ports
    replace ports in use.
    """
    host = config.interchange_server_host
    former = previous.gateway_ports if previous is not None else ()
    ports = former if len(former) == number else range(port + 1, port + 1 + number)
    bind = listen if config.public_base_url else listen_near
    with ExitStack() as sockets:
        listeners: list[socket.socket] = []
        for wanted in ports:
            try:
                listeners.append(sockets.enter_context(bind(host, wanted)))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"interchange_server.processes: a gateway process cannot listen on {host} port {wanted}: "
                    f"{error}; choose an interchange_server_port with free ports after it"
                ) from error
        yield listeners


def listen_near(host: str, port: int) -> socket.socket:
    """Listen at `port`, or at a free port if it is in use."""
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return listen(host, 0)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on IPPROTO_TCP sockets. Without it replies wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def _explain(config: InterchangeConfig, port: int, error: OSError) -> str:
    host = config.interchange_server_host
    if error.errno == errno.EADDRINUSE:
        return (
            f"interchange_server.interchange_server_port: port {port} on {host} is in use; "
            "stop the process that listens there, or set another port (--port 0 takes a free one)"
        )
    return f"interchange_server: cannot listen on {host} port {port}: {error.strerror or error}"


def _port_of(url: str) -> int:
    _, _, port = url.rpartition(":")
    return int(port) if port.isdecimal() else 0


def moved_to(config: InterchangeConfig, url: str) -> str:
    is_moved = config.interchange_server_port == "auto" and _port_of(url) != DEFAULT_PORT
    return f" (port {DEFAULT_PORT} was in use)" if is_moved else ""


def http_url(listener: socket.socket, *, tls: bool = False) -> str:
    name: tuple[str, int] = listener.getsockname()[:2]
    host, port = name
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def remote_url(url: str, host: str) -> str:
    if host not in ("0.0.0.0", "::"):
        return url
    return f"http://{socket.gethostname()}:{_port_of(url)}"


_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def bind_link(
    link: ServerLink, config: InterchangeConfig, run_dir: Path, previous: ServerInfo | None
) -> tuple[str, str]:
    """Return the link's local address, and its key folder or ""."""
    if config.interchange_method == "ipc":
        return link.bind(f"ipc://{socket_path(run_dir, 'link.ipc')}"), ""
    host = _ip_address(config.link_host)
    folder, keys = "", None
    if needs_link_keys(config):
        path = run_dir.absolute() / KEYS_DIR
        make_link_keys(path)
        folder, keys = str(path), load_server_keys(path)
    name = f"[{host}]" if host.version == 6 else str(host)
    address = _bind_tcp(link, name, config.link_port, previous, keys)
    return address.replace(f"//{name}:", f"//{_WILDCARDS.get(name, name)}:"), folder


def needs_link_keys(config: InterchangeConfig) -> bool:
    """TCP always needs keys, because any user may connect to a loopback address."""
    return config.interchange_method == "tcp"


def _bind_tcp(
    link: ServerLink, name: str, port: int, previous: ServerInfo | None, keys: ServerKeys | None
) -> str:
    former = _port_of(previous.link_address) if previous is not None and port == 0 else 0
    if former:
        try:
            return link.bind(f"tcp://{name}:{former}", keys)
        except ConfigError:
            return link.bind(f"tcp://{name}:*", keys)
    return link.bind(f"tcp://{name}:{port or '*'}", keys)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # ZeroMQ does not bind host names.
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ConfigError(
            f"interchange_server.link_host: {host!r} is not an IP address; use this machine's or 0.0.0.0"
        ) from error


def socket_path(run_dir: Path, name: str) -> Path:
    """Return a path in the run folder, or if that is too long, in a private temporary folder.

    Raises ConfigError if the temporary folder is not private.
    """
    path = run_dir.absolute() / name
    if len(os.fsencode(path)) < MAX_IPC_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"tinkerscript-{os.geteuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(f"{folder} must be a private folder of this user (chmod 700)")
    return folder / name
