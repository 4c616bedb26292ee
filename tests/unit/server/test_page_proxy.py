"""The page's middleware: which requests it takes, how they arrive, and what it says of a dead page."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from tinkerscript.asgi import BodyLimit, Refusals
from tinkerscript.server import page_proxy
from tinkerscript.server.auth import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.server.page_proxy import PageProcess, PageProxy

ECHO = """
import asyncio, sys
async def answer(reader, writer):
    try:
        head = await reader.readuntil(b"\\r\\n\\r\\n")
    except asyncio.IncompleteReadError:  # Somebody has looked whether we listen.
        return writer.close()
    if b"chunked" in head:
        await reader.read()
    length = [int(l.split(b":")[1]) for l in head.lower().split(b"\\r\\n") if l.startswith(b"content-length")]
    head += await reader.readexactly(length[0]) if length else b""
    extra = b"connection: close, x-hop\\r\\nx-hop: 1\\r\\nset-cookie: a=1\\r\\nset-cookie: b=2\\r\\n"
    writer.write(b"HTTP/1.1 200 OK\\r\\n" + extra + b"content-length: %d\\r\\n\\r\\n" % len(head) + head)
    await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_unix_server(answer, sys.argv[1]) as server:
        await server.serve_forever()
asyncio.run(main())
"""
"""A page that answers with the request as it arrived."""


@asynccontextmanager
async def proxied(page: PageProcess, max_bytes: int = 1000) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.get("/docs-of-the-server")(lambda: PlainTextResponse("own"))
    refusals = Refusals({})
    refusals.install(app)
    app.add_middleware(PageProxy, page=page, refusals=refusals)
    app.add_middleware(BodyLimit, max_bytes=max_bytes, refusals=refusals)
    running = asyncio.create_task(page.run())
    transport = httpx.ASGITransport(app, client=("10.1.2.3", 4))
    async with httpx.AsyncClient(transport=transport, base_url="https://run.example") as http:
        yield http
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> list[dict[str, str]]:
    """Make the page's process run `code` with the socket's path; returns the environments it got."""
    seen: list[dict[str, str]] = []

    async def start(run_dir: Path, option: str, path: str, *, environ: dict[str, str]) -> Any:
        assert option == "--socket"
        seen.append(environ)
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, path, stdin=pipe, start_new_session=True
        )

    monkeypatch.setattr(page_proxy, "start_page", start)
    monkeypatch.setattr("tinkerscript.server.page_child.STOP_GRACE_S", 0.1)
    return seen


async def test_requests_arrive_as_they_were_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, ECHO)
    headers = {
        "Origin": "https://run.example",
        "Cookie": "a=1",
        "Connection": "x-mine, close",
        "X-Mine": "1",
        "TE": "trailers",
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Proto": "http",
    }
    async with proxied(PageProcess(tmp_path, admin_token=None)) as http:
        reply = await http.post("/api/a%2Fb/c?q=a%20b&n=1", content=b"body", headers=headers)
        assert (reply.status_code, "x-hop" in reply.headers) == (200, False)
        assert reply.headers.get_list("set-cookie") == ["a=1", "b=2"]
        head, _, body = reply.text.partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        assert (first, body) == ("POST /api/a%2Fb/c?q=a%20b&n=1 HTTP/1.1", "body")
        sent = {line.lower() for line in lines}
        assert {"host: run.example", "origin: https://run.example", "cookie: a=1"} <= sent
        assert {"x-forwarded-for: 10.1.2.3", "x-forwarded-proto: https", "content-length: 4"} <= sent
        names = {line.partition(":")[0] for line in sent}
        assert not names & {"x-mine", "te", "transfer-encoding"}
        assert (await http.get("/page/x.js")).text.startswith("GET /page/x.js HTTP/1.1\r\n")


async def test_other_paths_and_long_bodies_do_not_reach_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runs(monkeypatch, ECHO)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100

    async with proxied(PageProcess(tmp_path, admin_token=None)) as http:
        assert (await http.get("/docs-of-the-server")).text == "own"
        for path in ("/apis", "/pages", "/page", "/health"):
            assert (await http.get(path)).status_code == 404
        assert (await http.post("/api/login", content=b"x" * 1001)).status_code == 413
        assert not seen
        assert (await http.post("/api/login", content=endless())).status_code == 413


async def test_the_page_gets_the_servers_admin_token_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (ADMIN_TOKEN, CLIENT_TOKEN):
        monkeypatch.setenv(name, "of-the-environment")
        monkeypatch.setenv(f"{name}_FILE", "/nowhere")
    seen = runs(monkeypatch, ECHO)
    for token in ("secret", None):
        async with proxied(PageProcess(tmp_path, admin_token=token)) as http:
            assert (await http.get("/")).status_code == 200
    tokens = [{name: value for name, value in each.items() if "TOKEN" in name} for each in seen]
    assert tokens == [{ADMIN_TOKEN: "secret"}, {}]
    assert seen[0]["PATH"] == os.environ["PATH"]


async def test_a_page_that_ends_at_once_is_not_started_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runs(monkeypatch, "raise SystemExit(3)")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "page.log").write_text("no module named fun")
    async with proxied(PageProcess(tmp_path, admin_token=None)) as http:
        for _ in range(3):
            reply = await http.get("/")
            assert reply.status_code == 503
            assert "exit code 3" in reply.json()["failure_reason"]
            assert "no module named fun" in reply.json()["failure_reason"]
        assert len(seen) == 1
        monkeypatch.setattr(page_proxy, "PAUSE_S", 0.0)
        assert (await http.get("/")).status_code == 503
        assert len(seen) == 2


async def test_a_page_that_never_listens_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(page_proxy, "START_S", 0.2)
    async with proxied(PageProcess(tmp_path, admin_token=None)) as http:
        reply = await http.get("/")
    assert reply.status_code == 503
    assert reply.json()["failure_reason"].startswith("the page did not start within")
    assert str(tmp_path / "logs" / "page.log") in reply.json()["failure_reason"]


async def test_a_page_that_dies_while_it_answers_is_a_503_and_a_stopping_server_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = ECHO.replace(
        "    extra =", "    sys.exit(1) if b'POST' in head else asyncio.sleep(0)\n    extra ="
    )
    runs(monkeypatch, dies)
    page = PageProcess(tmp_path, admin_token=None)
    async with proxied(page) as http:
        assert (await http.get("/")).status_code == 200
        reply = await http.post("/api/x", content=b"1")
        assert (reply.status_code, "the page did not answer" in reply.text) == (503, True)
        assert (await http.get("/")).status_code == 200, "a new one"
        page.close()
        reply = await http.get("/")
        assert (reply.status_code, "the server is stopping" in reply.text) == (503, True)
