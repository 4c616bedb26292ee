"""A real PostgreSQL in a temporary folder: started, killed, started again, and looked into."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tinkerscript.processes.launcher import free_port

OWNER = "postgres"
"""Who runs it where the tests run as root, which PostgreSQL refuses."""

START_S = 60.0

SETTINGS = (
    *("-c", "fsync=off", "-c", "full_page_writes=off"),  # What is killed is the database, not the machine.
    *("-c", "max_connections=200", "-c", "shared_buffers=64MB"),
)


class PostgresServer:
    """One database cluster, on a port of its own."""

    def __init__(self, folder: Path, *, settings: tuple[str, ...] = SETTINGS) -> None:
        self._data, self._log = folder / "data", folder / "postgres.log"
        self._folder = folder
        self._settings = settings
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        if _is_root():
            shutil.chown(folder, OWNER, OWNER)
        options = ("--username", "postgres", "--auth", "trust", "--no-sync", "--encoding", "UTF8")
        self._run("initdb", "--pgdata", str(self._data), *options, "--no-locale")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Returns when it accepts connections."""
        log = self._log.open("ab")
        address = ("-p", str(self.port), "-k", str(self._folder), "-h", "127.0.0.1")
        self.process = subprocess.Popen(
            [_program("postgres"), "-D", str(self._data), *address, *self._settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            **_as_owner(),
        )
        log.close()
        deadline = time.monotonic() + START_S
        while not self.is_up():
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, "PostgreSQL does not accept connections"
            time.sleep(0.05)

    def is_up(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL for the whole of it, as a machine that dies; returns when it is gone."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def pause(self) -> None:
        """It answers nothing until `go_on`, and keeps every connection."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        command = ["ps", "-o", "pid=", "--ppid", str(self.process.pid)]
        found = subprocess.run(command, capture_output=True, text=True)
        for pid in {self.process.pid, *map(int, found.stdout.split())}:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # It ended with the one before.

    def query(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of a query, read in a connection of its own; [] for one without rows."""
        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(sql.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run([_program(name), *arguments], capture_output=True, text=True, **_as_owner())
        assert done.returncode == 0, done.stderr


@contextmanager
def running_postgres(*, settings: tuple[str, ...] = SETTINGS) -> Generator[PostgresServer]:
    """Not in pytest's folders, which another user cannot enter."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        server = PostgresServer(folder, settings=settings)
        server.start()
        try:
            yield server
        finally:
            if server.process is not None and server.process.poll() is None:
                server.kill()
    finally:
        shutil.rmtree(folder)


@contextmanager
def running_pooler(database: PostgresServer) -> Generator[str]:
    """PgBouncer in front of it, one session of the database for each transaction; gives the URL."""
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    port = free_port()
    config = folder / "pgbouncer.ini"
    lines = [
        "[databases]",
        f"* = host=127.0.0.1 port={database.port} user=postgres",
        "[pgbouncer]",
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =",
        "auth_type = any\npool_mode = transaction\ndefault_pool_size = 5\nmax_client_conn = 100",
        "server_lifetime = 1",  # Sessions change all the time.
    ]
    config.write_text("\n".join(lines))
    for path in (folder, config):
        if _is_root():
            shutil.chown(path, OWNER, OWNER)
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [_program("pgbouncer"), str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, **_as_owner()
    )
    try:
        _until_listening(port, process, folder / "log")
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        process.terminate()
        process.wait()
        log.close()
        shutil.rmtree(folder)


def _until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return


def _is_root() -> bool:
    return getpass.getuser() == "root" or os.geteuid() == 0


def _as_owner() -> dict[str, Any]:
    return {"user": OWNER, "group": OWNER, "extra_groups": (), "cwd": "/tmp"} if _is_root() else {}


def _program(name: str) -> str:
    """Debian keeps PostgreSQL's programs out of the way."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = shutil.which(name) or next(map(str, places), None) or shutil.which(name, path="/usr/sbin:/sbin")
    assert found, f"install {name}: Debian's packages postgresql and pgbouncer"
    return str(Path(found).resolve())
