"""A model that is served by itself: where its answers end, and which API keys it takes."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI
from rich.console import Console

from asgi_caller import AsgiCaller
from clock import Clock
from rollout_helpers import make_call
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN, Roles
from tinkerscript.commands import serve as module
from tinkerscript.commands.serve import Served, serve_checkpoint, served_config
from tinkerscript.config import EngineConfig, InterchangeConfig
from tinkerscript.errors import GatewayError, WorkerError
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.endpoint import create_gateway
from tinkerscript.limits import KEPT_BYTES, KEPT_CALLS, KEPT_S
from tinkerscript.processes.children import ServerAddress, engine_child
from tinkerscript.processes.supervisor import Supervisor
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


class Ended(Supervisor):
    async def failed(self) -> None:
        raise WorkerError("that is all")


def test_the_engine_computes_where_and_as_it_was_asked_to(tmp_path: Path) -> None:
    asked = EngineConfig(model="/model", device="cuda:1", dtype="bfloat16")
    child = engine_child(asked, ServerAddress("http://here", "ipc:///link", None), tmp_path)
    words = " ".join(child.argv(0))
    assert " --device cuda:1 --dtype bfloat16" in words


@pytest.mark.parametrize("token", [None, "sixteen-letters!"])
async def test_serve_names_its_keys(monkeypatch: pytest.MonkeyPatch, clock: Clock, token: str | None) -> None:
    @asynccontextmanager
    async def served(*_: object, **__: object) -> AsyncGenerator[Served]:
        yield Served("tiny[x]", ServerAddress("http://here", "", None), Ended(max_restarts=0, note=print))

    for name in (CLIENT_TOKEN, f"{CLIENT_TOKEN}_FILE", ADMIN_TOKEN, f"{ADMIN_TOKEN}_FILE"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv(CLIENT_TOKEN, token)
    monkeypatch.setattr(module, "served_checkpoint", served)
    printed = io.StringIO()
    with pytest.raises(WorkerError, match="that is all"):
        await serve_checkpoint("tiny", "127.0.0.1", 0, Console(file=printed, width=40))
    keys = f"the API key is {CLIENT_TOKEN}" if token else "any API key will do"
    assert printed.getvalue() == f"serving 'tiny[x]' at http://here/v1 ({keys})\n"
    roles = Roles.of(InterchangeConfig(), os.environ, serve_model=True)
    model = served_model(roles.client_token, clock)
    if token is None:
        assert await model.open("any") != await model.open("")
    else:
        await model.open(token)
        with pytest.raises(GatewayError, match="does not open this model"):
            await model.open("any")


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
