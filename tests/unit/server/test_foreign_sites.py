"""What a web page of another site may do to a server: nothing, on any route, with or without tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from interchange_helpers import run_config
from tinkerscript.access_tokens import Roles
from tinkerscript.ledger import Ledger
from tinkerscript.server.app import InterchangeServer, create_server
from tinkerscript.tinker_api.wire_server import PREFIX, WIRE_ENDPOINTS, wire_app

TOKENS = Roles("the-client-token-of-this-test", "the-admin-token-of-this-test")
BINARY = {"/record_transcript"}


Serving = Callable[..., Awaitable[InterchangeServer]]


@pytest.fixture
async def serving(tmp_path: Path, byte_model: Path, ledger: Ledger) -> AsyncIterator[Serving]:
    """Makes servers: without tokens, unless it gets some."""
    made = list[InterchangeServer]()

    async def serve(roles: Roles | None = None, **options: Any) -> InterchangeServer:
        config = run_config(byte_model)
        made.append(await create_server(config, tmp_path, ledger=ledger, roles=roles or Roles(), **options))
        return made[-1]

    yield serve
    for server in made:
        server.link.close()


@pytest.fixture(params=["a run", "a model that is served"])
async def server(serving: Serving, request: pytest.FixtureRequest) -> InterchangeServer:
    return await serving(serve_model=request.param != "a run")


def caller(server: InterchangeServer, host: str = "localhost:10086") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url=f"http://{host}")


def routes(server: InterchangeServer) -> Iterator[tuple[str, str]]:
    """Every method and path that the server has, from the app itself."""
    for path, methods in server.api.openapi()["paths"].items():
        for method in methods:
            yield method.upper(), path
    yield from (("GET", "/openapi.json"), ("GET", "/nothing"))


async def test_without_tokens_no_route_answers_to_a_foreign_name(server: InterchangeServer) -> None:
    tried = [*routes(server)]
    assert {path for _, path in tried} >= {"/stop_engine", "/fleet", "/claim_episode", "/v1/chat/completions"}
    for host in ("evil.example", "localhost.evil.example:10086", "10.0.0.1", ""):
        async with caller(server) as http:
            for method, path in tried:
                reply = await http.request(method, path, headers={"host": host})
                assert reply.status_code == 403, (method, path, host)
                assert "localhost, 127.0.0.1 and ::1 only" in reply.text


@pytest.mark.parametrize("where", ["open", "with tokens"])
async def test_no_route_answers_to_another_sites_page(serving: Serving, where: str) -> None:
    server = await serving(None if where == "open" else TOKENS)
    said_by_browsers = (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:8888"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "origin": "https://evil.example"},
    )
    async with caller(server) as http:
        for method, path in routes(server):
            for headers in said_by_browsers:
                if method == "GET" and "origin" in headers:
                    continue
                admin = {"authorization": f"Bearer {TOKENS.admin_token}"}
                reply = await http.request(method, path, headers=headers | admin)
                assert reply.status_code == 403, (method, path, headers)
                assert "another site" in reply.text
        followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await http.get("/health", headers=followed)).status_code == 200, "a link may lead here"


async def test_no_route_takes_what_a_form_can_send(server: InterchangeServer) -> None:
    simple = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None)
    async with caller(server) as http:
        for method, path in routes(server):
            if method != "POST" or path in BINARY:
                continue
            for kind in simple:
                headers = {} if kind is None else {"content-type": kind}
                reply = await http.post(path, content=b'{"client_uuid": "c"}', headers=headers)
                assert reply.status_code == 415, (path, kind)
                assert "application/json" in reply.text


async def test_programs_are_let_in(serving: Serving) -> None:
    server, closed_server = await serving(), await serving(TOKENS)
    for host in ("localhost:10086", "127.0.0.1", "[::1]:80", "LOCALHOST", "127.0.0.2:1"):
        async with caller(server) as http:
            assert (await http.get("/health", headers={"host": host})).status_code == 200
    async with caller(server) as http:
        for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
            headers = {"content-type": kind}
            reply = await http.post("/is_episode_claimed", content=b'{"episode_uuid": "e"}', headers=headers)
            assert reply.status_code == 200, kind
        own = {"origin": "http://localhost:10086", "sec-fetch-site": "same-origin"}
        for headers in ({}, own):
            reply = await http.post("/stop_engine", headers=headers)
            assert reply.status_code == 409, "no trainer is there"
    async with caller(closed_server, "gpu-7.example") as http:
        assert (await http.get("/health")).status_code == 200, "with tokens under any name"


async def test_the_tinker_api_answers_no_foreign_name_and_no_other_site() -> None:
    state: Any = None  # No request gets as far.
    transport = httpx.ASGITransport(wire_app(state))
    headers = {"x-api-key": "any key will do"}
    foreign = ({"host": "evil.example"}, {"origin": "https://evil.example"})
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1", headers=headers) as http:
        for method, path in WIRE_ENDPOINTS:
            for more in foreign if method != "GET" else foreign[:1]:
                reply = await http.request(method, PREFIX + path, headers=more)
                assert reply.status_code == 403, (method, path, more)
