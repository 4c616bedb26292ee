"""Names that reach a role, and a frozen role with a tokenizer and a chat format of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway_bench import CLAIM, SAMPLING
from tinkerscript.config import SamplingConfig
from tinkerscript.errors import ConfigError
from tinkerscript.gateway.endpoint import Gateway, create_gateway
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import Sampler
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler


def create(
    folder: Path,
    sampler: Sampler,
    claims: MemoryClaimBook | None = None,
    sampling: SamplingConfig = SAMPLING,
    **more: Any,
) -> Gateway:
    return create_gateway(
        claims=claims or MemoryClaimBook({"key": CLAIM}),
        sampler=sampler,
        model_folder=folder,
        model_name="own",
        sampling=sampling,
        **more,
    )


@asynccontextmanager
async def client(gateway: Gateway) -> AsyncGenerator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(gateway.router)
    transport, headers = httpx.ASGITransport(app), {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        yield http


CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def test_a_frozen_role_has_its_own_chat_format_and_conversations(byte_model: Path) -> None:
    sampler, claims = ScriptedSampler(lambda prompt: [5, 6]), MemoryClaimBook({"key": CLAIM})
    rival = ChatRenderer(TINY_MODEL)
    async with client(create(byte_model, sampler, claims, sampled={"rival": rival})) as http:
        for name in ("policy", "rival"):
            reply = await http.post(CHAT, json={"model": name, "messages": HI})
            assert reply.status_code == 200, reply.text
            more = [*HI, reply.json()["choices"][0]["message"], *HI]
            assert (await http.post(CHAT, json={"model": name, "messages": more})).status_code == 200
        unknown = await http.post(CHAT, json={"model": "gpt-9", "messages": HI})
        counted = await http.post("/v1/responses/input_tokens", json={"model": "rival", "input": "hi"})
    assert unknown.status_code == 404
    assert "'rival'" in unknown.json()["error"]["message"]
    assert [request.role for request in sampler.requests] == ["", "", "rival", "rival"]
    prompt = rival.render(HI, [])
    assert sampler.requests[2].prompt == pack_ids(prompt) != sampler.requests[0].prompt
    assert counted.json()["input_tokens"] == len(prompt)
    calls = claims.recorded[CLAIM]
    assert [call.role for call in calls] == ["", "", "rival", "rival"]
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, None, calls[2].call_id]
    assert {call.tokenizer for call in calls if call.role} == {rival.tokenizer.fingerprint}
    own, theirs = merge_calls(calls, episode_uuid="e"), merge_calls(calls, episode_uuid="e", role="rival")
    assert {segment.call.role for each in own for segment in each.segments} == {""}
    assert {segment.call.role for each in theirs for segment in each.segments} == {"rival"}


def test_a_role_cannot_take_a_name_of_the_policy(byte_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"roles\.own: requests use this name for the policy"):
        create(byte_model, ScriptedSampler(lambda prompt: [5]), sampled={"own": ChatRenderer(TINY_MODEL)})


async def test_names_that_the_server_does_not_accept_are_refused(byte_model: Path) -> None:
    gateway = create(byte_model, ScriptedSampler(lambda prompt: [72]), accepted_names=["gpt-4o"])
    async with client(gateway) as http:
        for name in ("gpt-4o", "policy", "own"):
            reply = await http.post("/v1/responses", json={"model": name, "input": "x"})
            assert reply.status_code == 200, reply.text
        refused = await http.post("/v1/responses", json={"model": "gpt-5", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'gpt-4o' (interchange_server.model_names)" in refused.json()["error"]["message"]
        shown = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in shown] == ["own", "policy", byte_model.name, "gpt-4o"]


@pytest.mark.parametrize("precedence", ["program", "run"])
async def test_a_run_may_overrule_how_programs_sample_the_policy(byte_model: Path, precedence: str) -> None:
    """The roles that do not train, such as a judge, are sampled as the program asks."""
    sampler, claims = ScriptedSampler(lambda prompt: [5, 6]), MemoryClaimBook({"key": CLAIM})
    sampling = SAMPLING.model_copy(update={"precedence": precedence})
    roles = {name: ChatRenderer(TINY_MODEL) for name in ("judge", "rival")}
    gateway = create(byte_model, sampler, claims, sampling=sampling, sampled=roles, frozen=["judge"])
    body = {"messages": HI, "temperature": 0, "top_p": 0.9, "top_k": 5, "max_tokens": 7}
    async with client(gateway) as http:
        for name in ("policy", "rival", "judge"):
            reply = await http.post(CHAT, json={"model": name, **body})
            assert reply.status_code == 200, reply.text
    asked, overruled = (0, 0.9, 5, 7), (SAMPLING.temperature, 1.0, -1, 7)
    expected = [overruled, overruled, asked] if precedence == "run" else [asked] * 3
    sampled = [(r.temperature, r.top_p, r.top_k, r.max_tokens) for r in sampler.requests]
    assert sampled == expected
    recorded = [(call.temperature, call.top_p, call.top_k) for call in claims.recorded[CLAIM]]
    assert recorded == [each[:3] for each in expected]
