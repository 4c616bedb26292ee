"""What `Upstream` retries and what it does not: a sample is requested again only if no reply started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.samplers.inference_server import Upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
CUT = OK[:-1]


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncGenerator[tuple[Upstream, list[bytes]]]:
    """A server that sends `answers[n]` to its nth request and closes; b"" closes without a reply."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head)
        writer.write(answers[len(requests) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    upstream = Upstream(f"http://{host}:{port}", timeout_s=10)
    try:
        yield upstream, requests
    finally:
        await upstream.aclose()
        server.close()
        await server.wait_closed()


async def test_a_connection_that_closes_without_an_answer_is_tried_once_more() -> None:
    async with answering(b"", OK) as (upstream, requests):
        assert await upstream.post("/generate", {}) == b"{}"
        assert len(requests) == 2


@pytest.mark.parametrize(
    ("answers", "asked"), [((b"", b"", OK), 2), ((CUT, OK), 1)], ids=["twice", "cut off"]
)
async def test_it_is_tried_no_more_than_once_more_and_not_after_part_of_an_answer(
    answers: tuple[bytes, ...], asked: int
) -> None:
    async with answering(*answers) as (upstream, requests):
        with pytest.raises(GatewayError) as caught:
            await upstream.post("/generate", {})
        assert (caught.value.status, len(requests)) == (503, asked)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too hot"}}',
        b'{"error": "too hot"}',
        b'{"object": "error", "message": "too hot"}',
        b'{"detail": "too hot"}',
        b"\xff too hot",
    ],
)
async def test_the_servers_own_words_are_passed_on(body: bytes) -> None:
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with answering(head + body) as (upstream, _):
        with pytest.raises(GatewayError, match="too hot") as caught:
            await upstream.post("/generate", {})
        assert (caught.value.status, caught.value.code) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("url", "base"), [("http://h:1/v1/", "http://h:1"), ("http://h:1/api", "http://h:1/api")]
)
async def test_the_v1_of_openais_clients_may_be_there(url: str, base: str) -> None:
    assert Upstream(url).url == base
