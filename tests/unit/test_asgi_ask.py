"""Requests to an app in this process."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tinkerscript.asgi import ask


async def answer(request: Request) -> PlainTextResponse:
    if request.query_params["number"] == "13":
        raise RuntimeError("a defect")
    return PlainTextResponse(f"{request.url} {(await request.body()).decode()}")


APP = Starlette(routes=[Route("/double it", answer, methods=["POST"])])


async def test_a_defect_in_the_app_is_a_reply_and_not_the_askers_error() -> None:
    url = "http://server.example:81/double%20it?number="
    failed = await ask(APP, "POST", f"{url}13", {}, b"x")
    assert (failed.status, failed.body) == (500, b"Internal Server Error")
    whole = await ask(APP, "POST", f"{url}12", {}, b"body")
    assert (whole.status, whole.body.decode()) == (200, "http://server.example:81/double it?number=12 body")
    assert whole.headers["content-type"].startswith("text/plain")
