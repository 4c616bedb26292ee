"""Fast routes, refusals and the body limit around any application, without a server of episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Scope

from tinkerscript.asgi import FastRoute, Refusals, ask, fast_router, in_front
from tinkerscript.errors import ConflictError, StoreError, UnauthorizedError


class Number(BaseModel):
    value: int


async def double(body: Number, request: Request) -> Number:
    """Double a number."""
    if body.value < 0:
        raise StoreError("no space left")
    if body.value == 14:
        raise RuntimeError("a defect")
    return Number(value=2 * body.value)


def authorize(scope: Scope) -> None:
    if (b"authorization", b"Bearer key") not in scope["headers"]:
        raise UnauthorizedError(401, "this route needs a key")


def shouted(status: int, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason.upper()}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app, refusals = FastAPI(), Refusals({"/loud/quiet": lambda status, reason: {}, "/loud/": shouted})
    refusals.install(app)
    route = FastRoute(double, authorize)
    fast = {"/double": route, "/loud/double": route}
    app.include_router(fast_router(fast, tags=["t"]))

    @app.post("/slow")
    async def slow(body: Number) -> Number:  # pyright: ignore[reportUnusedFunction]
        raise ConflictError("taken")

    front = in_front(app, models={}, fast=fast, max_body_bytes=100, refusals=refusals)
    transport = httpx.ASGITransport(front, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=headers) as client:
        yield client


async def test_a_fast_route_answers_and_is_documented(http: httpx.AsyncClient) -> None:
    reply = await http.post("/double", json={"value": 4})
    assert (reply.status_code, reply.json()) == (200, {"value": 8})
    operation = (await http.get("/openapi.json")).json()["paths"]["/double"]["post"]
    assert (operation["description"], operation["tags"]) == ("Double a number.", ["t"])


@pytest.mark.parametrize("path", ["/double", "/slow"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"value": "x"}', "value: Input should be a valid integer, unable to parse string as an integer"),
        (b"{}", "value: Field required"),
        (b"[]", "the body: Input should be"),
        (b'{"value"', "the body is not valid JSON"),
    ],
)
async def test_a_bad_body_is_refused(http: httpx.AsyncClient, path: str, content: bytes, reason: str) -> None:
    reply = await http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 422
    assert reply.json()["failure_reason"].startswith(reason)


async def test_the_status_tells_a_client_whether_to_retry(http: httpx.AsyncClient) -> None:
    conflict = await http.post("/slow", json={"value": 1})
    assert (conflict.status_code, conflict.headers.get("retry-after")) == (409, None)
    failed = await http.post("/double", json={"value": -1})
    assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
    assert failed.json()["failure_reason"] == "no space left"
    defect = await http.post("/double", json={"value": 14})
    assert (defect.status_code, "a defect" in defect.text) == (500, False)
    keyless = await http.post("/double", json={"value": 1}, headers={"Authorization": ""})
    assert (keyless.status_code, keyless.headers["www-authenticate"]) == (401, "Bearer")


async def test_the_first_prefix_that_matches_makes_the_body(http: httpx.AsyncClient) -> None:
    reply = await http.post("/loud/double", json={"value": -1})
    assert reply.json() == {"status": 503, "reason": "NO SPACE LEFT"}
    assert (await http.post("/loud/quiet")).json() == {}
    assert (await http.post("/nowhere")).json()["failure_reason"] == "Not Found"


async def test_a_long_body_is_refused_whether_it_says_its_length_or_streams(http: httpx.AsyncClient) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 40

    for content in (b" " * 120, stream()):
        reply = await http.post("/loud/double", content=content)
        assert reply.status_code == 413
        assert "the limit is 100".upper() in reply.text.upper()


async def answer(request: Request) -> PlainTextResponse:
    if request.query_params["number"] == "13":
        raise RuntimeError("a defect")
    return PlainTextResponse(f"{request.url} {(await request.body()).decode()}")


async def test_a_defect_in_an_app_of_this_process_is_a_reply_and_not_the_askers_error() -> None:
    app = Starlette(routes=[Route("/double it", answer, methods=["POST"])])
    url = "http://server.example:81/double%20it?number="
    failed = await ask(app, "POST", f"{url}13", {}, b"x")
    assert (failed.status, failed.body) == (500, b"Internal Server Error")
    whole = await ask(app, "POST", f"{url}12", {}, b"body")
    assert (whole.status, whole.body.decode()) == (200, "http://server.example:81/double it?number=12 body")
    assert whole.headers["content-type"].startswith("text/plain")
