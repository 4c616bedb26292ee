"""Whom the page asks about a run, with the admin token: a server of this user on this machine alone."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from certificates import write_certificate
from tinkerscript.addresses import SERVER_FILE, ServerInfo
from tinkerscript.errors import NotRecordedError
from tinkerscript.page.runs import RunServer

TOKEN = "the-admin-token-of-this-test"


@asynccontextmanager
async def listener(heard: list[bytes], tls: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    """Answers `{}` to everything; `heard`: what it was sent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


def write_info(folder: Path, url: str, *, pid: int = 0, certificate: str = "") -> None:
    info = ServerInfo(url, "", pid or os.getpid(), "id", certificate=certificate)
    (folder / SERVER_FILE).write_bytes(msgspec.json.encode(info))


async def ask(folder: Path) -> dict[str, object]:
    server = RunServer(folder, TOKEN)
    try:
        return await server.fleet()
    finally:
        await server.close()


async def test_a_server_of_this_user_on_this_machine_gets_the_token(tmp_path: Path) -> None:
    heard = list[bytes]()
    async with listener(heard) as port:
        write_info(tmp_path, f"http://127.0.0.1:{port}")
        assert await ask(tmp_path) == {}
    assert TOKEN.encode() in heard[0]


@pytest.mark.parametrize("host", ["elsewhere.example", "192.0.2.1", "[2001:db8::1]", "127.0.0.1.example"])
async def test_nobody_elsewhere_is_asked(tmp_path: Path, host: str) -> None:
    write_info(tmp_path, f"http://{host}:10086")
    with pytest.raises(NotRecordedError, match="is on another machine"):
        await ask(tmp_path)


async def test_the_folder_of_another_user_names_nobody_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, us = list[bytes](), os.geteuid()
    async with listener(heard) as port:
        write_info(tmp_path, f"http://127.0.0.1:{port}")
        monkeypatch.setattr("os.geteuid", lambda: us + 1)
        with pytest.raises(NotRecordedError, match="belongs to another user"):
            await ask(tmp_path)
    assert heard == []


async def test_who_took_the_port_of_a_dead_server_is_not_asked(tmp_path: Path) -> None:
    heard = list[bytes]()
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    async with listener(heard) as port:
        write_info(tmp_path, f"http://127.0.0.1:{port}", pid=ended.pid)
        with pytest.raises(NotRecordedError, match="has ended"):
            await ask(tmp_path)
    assert heard == []


async def test_a_server_with_https_shows_its_own_certificate(tmp_path: Path) -> None:
    heard = list[bytes]()
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    certificate, key = write_certificate(tmp_path / "own")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with listener(heard, tls) as port:
        write_info(tmp_path, f"https://127.0.0.1:{port}", certificate=str(certificate))
        assert await ask(tmp_path) == {}
        assert len(heard) == 1
        for other in (str(write_certificate(tmp_path / "other")[0]), ""):
            write_info(tmp_path, f"https://127.0.0.1:{port}", certificate=other)
            with pytest.raises(NotRecordedError, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(tmp_path)
    assert len(heard) == 1
