"""A model that is served by itself: its answers end where it ends them, or with its context."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from asgi_caller import AsgiCaller
from tinkerscript.commands.serve import served_config
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.gateway import create_gateway
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler


async def test_a_request_without_a_limit_has_the_whole_context(byte_model: Path) -> None:
    config = served_config(byte_model, "127.0.0.1", 0)
    sampler = ScriptedSampler(lambda prompt: [97] * 200)
    gateway = create_gateway(
        claims=MemoryClaimBook({"key": OpenClaim("episode", 1, 0)}),
        sampler=sampler,
        model_folder=byte_model,
        model_name="bytes",
        sampling=config.sampling,
    )
    app = FastAPI()
    app.include_router(gateway.router)
    body = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
    caller = AsgiCaller(app, "/v1/chat/completions", body, {"Authorization": "Bearer key"})
    reply = (await caller.run()).json()
    assert reply["usage"]["completion_tokens"] == 200
    (request,) = sampler.requests
    assert request.max_tokens == 4096 - reply["usage"]["prompt_tokens"]
