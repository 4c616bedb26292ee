"""A model that is served by itself: where its answers end, and which API keys it takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI

from asgi_caller import AsgiCaller
from clock import Clock
from rollout_helpers import make_call
from tinkerscript.commands.serve import served_config
from tinkerscript.config import EngineConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.endpoint import create_gateway
from tinkerscript.limits import KEPT_BYTES, KEPT_CALLS, KEPT_S
from tinkerscript.processes.children import ServerAddress, engine_child
from tinkerscript.rollouts.call import Call
from tinkerscript.server.claims import ServedModel
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler


async def test_a_request_without_a_limit_has_the_whole_context(byte_model: Path) -> None:
    config = served_config(EngineConfig(), byte_model, "127.0.0.1", 0)
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


def served_model(token: str | None, clock: Clock) -> ServedModel:
    return ServedModel(token, ServerMetrics(EpisodeBook(clock=clock, max_attempts=1)), clock=clock)


def test_the_engine_computes_where_and_as_it_was_asked_to(tmp_path: Path) -> None:
    asked = EngineConfig(model="/model", device="cuda:1", dtype="bfloat16")
    child = engine_child(asked, ServerAddress("http://here", "ipc:///link", None), tmp_path)
    words = " ".join(child.argv(0))
    assert " --device cuda:1 --dtype bfloat16" in words


async def test_a_served_model_takes_any_key_unless_it_has_a_token(clock: Clock) -> None:
    served = served_model(None, clock)
    assert await served.open("any") != await served.open("")
    closed = served_model("sixteen-letters!", clock)
    await closed.open("sixteen-letters!")
    with pytest.raises(GatewayError, match="does not open this model"):
        await closed.open("any")


def stored(number: int, parent: int | None = None, text: str = "") -> Call:
    names = {"call_id": f"c{number}", "parent_id": None if parent is None else f"c{parent}"}
    return msgspec.structs.replace(make_call(None, [1], [2]), **names, reply=text)


async def test_the_responses_that_a_served_model_keeps_are_bounded(clock: Clock) -> None:
    """In number, bytes and time; those that are used stay, with all that they extend."""
    model = served_model(None, clock)
    mine, others = await model.open("mine"), await model.open("another's")
    model.keep(mine, [stored(0), stored(1, parent=0)])
    assert [each.call_id for each in model.kept(mine, "c1")] == ["c0", "c1"]
    assert model.kept(others, "c1") == []
    model.keep(mine, [stored(number) for number in range(2, KEPT_CALLS)])
    assert model.kept(mine, "c1")
    model.keep(mine, [stored(KEPT_CALLS)])
    assert (model.kept(mine, "c2"), len(model.kept(mine, "c1"))) == ([], 2)
    clock.now += KEPT_S
    assert model.kept(mine, "c1")
    assert model.kept(mine, f"c{KEPT_CALLS}")
    clock.now += KEPT_S + 1
    assert model.kept(mine, "c1") == []
    large = range(KEPT_CALLS + 1, KEPT_CALLS + 6)
    model.keep(mine, [stored(number, text="x" * (KEPT_BYTES // 4 - 99)) for number in large])
    assert [len(model.kept(mine, f"c{number}")) for number in large] == [0, 1, 1, 1, 1]
