"""A model that is served by itself: its answers end where it ends them, or with its context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi import FastAPI

from asgi_caller import AsgiCaller
from tinkerscript.commands.serve import served_config
from tinkerscript.config import context_of
from tinkerscript.errors import ConfigError
from tinkerscript.gateway.claim_book import MemoryClaimBook, OpenClaim
from tinkerscript.gateway.gateway import create_gateway
from tinkerscript.gateway.sampler import ScriptedSampler


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


def test_the_context_is_read_of_text_models_inside_others_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert context_of(tmp_path) == 77
    path.write_text("{}")
    with pytest.raises(ConfigError, match="has no max_position_embeddings"):
        context_of(tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        context_of(tmp_path)
