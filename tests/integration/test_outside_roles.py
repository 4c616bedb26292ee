"""Roles that an outside server answers, through a whole server: every dialect, records, limits, secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from interchange_helpers import FAST, collect, new_episodes, run_config, trainer
from interchange_setup import Setup
from outside_chat import KEY, OutsideChat, outside_chat
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError
from tinkerscript.limits import Totals
from tinkerscript.rollouts.call import Call
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.server.process import running_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.messages import EpisodeAccepted

CALL: dict[str, Any] = {
    "id": "call_7",
    "type": "function",
    "function": {"name": "mark", "arguments": '{"points": 3}'},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "mark", "parameters": {"type": "object"}}}


@asynccontextmanager
async def judged(
    folder: Path,
    model: Path,
    outside: OutsideChat,
    *,
    role: dict[str, Any] | None = None,
    totals: Totals | None = None,
    **interchange: Any,
) -> AsyncIterator[Setup]:
    """A server whose runs have the role `judge`."""
    data = run_config(model, **interchange).model_dump()
    judge = {"kind": "outside", "base_url": outside.url, "model": "big", "api_key_env": "JUDGE_KEY"}
    data["roles"] = {"judge": judge | (role or {})}
    config = RunConfig.model_validate(data)
    sampler = ScriptedSampler(lambda prompt: [72, 105, prompt[-1]], policy_version=4)
    async with (
        running_server(config, folder, environ={"JUDGE_KEY": KEY}, times=FAST, totals=totals) as (info, _),
        trainer(info.link_address, sampler.sample) as link,
        httpx.AsyncClient(base_url=info.url, timeout=30) as http,
    ):
        await link.resume([])
        yield Setup(http, link, info.url, folder, sampler)


async def claim_of(setup: Setup, name: str = "a") -> Any:
    await setup.link.register(new_episodes(name))
    return await setup.claim()


async def calls_of_result(setup: Setup, claim: Any) -> list[Call]:
    """End the episode, and return the calls that the trainer gets."""
    await setup.end(claim)
    outcome = (await collect(setup.link, 1))[claim.episode_uuid]
    assert isinstance(outcome, EpisodeAccepted)
    return outcome.all_calls


async def test_a_judge_answers_in_every_dialect_and_never_trains(tmp_path: Path, byte_model: Path) -> None:
    async with (
        outside_chat(lambda request: "fine") as outside,
        judged(tmp_path, byte_model, outside) as setup,
    ):
        claim = await claim_of(setup)
        assert claim.roles == ["judge"]
        url, key = claim.openai_base_url, claim.openai_api_key
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            asked: list[Any] = [{"role": "user", "content": "how good?"}]
            await client.chat.completions.create(model="policy", messages=asked)
            chat = await client.chat.completions.create(model="judge", messages=asked, temperature=0.25)
            response = await client.responses.create(model="judge", input="how good?")
            following = await client.responses.create(
                model="judge", input="sure?", previous_response_id=response.id
            )
            messages = [
                await setup.http.post(
                    "/v1/messages",
                    json={"model": "judge", "messages": asked, "max_tokens": 50, "stream": stream},
                    headers={"x-api-key": key},
                )
                for stream in (False, True)
            ]
            stream = await client.chat.completions.create(model="judge", messages=asked, stream=True)
            chunks = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            models = {model.id async for model in await client.models.list()}
            await client.chat.completions.create(
                model="policy", messages=[*asked, {"role": "assistant", "content": "Hi"}, *asked]
            )
        assert chat.choices[0].message.content == response.output_text == following.output_text == "fine"
        message, events = messages[0].json(), messages[1].text
        assert message["content"] == [{"type": "text", "text": "fine"}]
        assert "".join(re.findall(r'"text_delta","text":"(.*?)"', events)) == "fine"
        assert "".join(chunks) == "fine"
        assert len(chunks) > 4
        assert (chat.model, chat.usage and chat.usage.prompt_tokens, message["usage"]["output_tokens"]) == (
            "judge",
            11,
            4,
        )
        assert {"policy", "judge"} <= models
        assert outside.keys == {f"Bearer {KEY}"}
        assert {request["model"] for request in outside.requests} == {"big"}
        assert outside.requests[0]["temperature"] == 0.25
        assert "temperature" not in outside.requests[1]
        assert [each["content"] for each in outside.requests[2]["messages"]] == ["how good?", "fine", "sure?"]
        calls = await calls_of_result(setup, claim)
        roles = [call.role for call in calls]
        assert roles == ["", *["judge"] * 6, ""]
        assert calls[3].parent_id == calls[2].call_id
        assert calls[-1].fork_reason in (None, "history_edited")  # As without the judge's calls.
        assert all(not call.sampled and call.reported_tokens == (11, 4) for call in calls if call.role)
        (*rollouts,) = merge_calls(calls, episode_uuid="a")
        assert {segment.call.role for each in rollouts for segment in each.segments} == {""}


async def test_tools_and_formats_are_forwarded_and_ids_refused(tmp_path: Path, byte_model: Path) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [CALL]}

    async with outside_chat(answer) as outside, judged(tmp_path, byte_model, outside) as setup:
        claim = await claim_of(setup)
        async with openai.AsyncOpenAI(
            base_url=claim.openai_base_url, api_key=claim.openai_api_key, max_retries=0
        ) as client:
            asked: list[Any] = [{"role": "user", "content": "mark it"}]
            create: Any = client.chat.completions.create
            for stream in (False, True):
                reply = await create(
                    model="judge", messages=asked, tools=[TOOL], tool_choice="required", stream=stream
                )
                if stream:
                    parts = [chunk.choices[0].delta async for chunk in reply if chunk.choices]
                    (called,) = [part.tool_calls[0] for part in parts if part.tool_calls]
                else:
                    (called,) = reply.choices[0].message.tool_calls
                    assert reply.choices[0].finish_reason == "tool_calls"
                assert (called.function.name, called.function.arguments) == ("mark", '{"points": 3}')
            sent = outside.requests[0]
            assert sent["tool_choice"] == {"type": "function", "function": {"name": "mark"}}
            for refused in ({"logprobs": True}, {"extra_body": {"return_token_ids": True}}):
                with pytest.raises(openai.BadRequestError, match="without token ids; leave it out"):
                    await create(model="judge", messages=asked, **refused)
            with pytest.raises(openai.BadRequestError, match=r"prompt: .*use messages"):
                await client.completions.create(model="judge", prompt="once")
            with pytest.raises(openai.NotFoundError, match="'Judge' does not exist here"):
                await create(model="Judge", messages=asked)
        assert len(outside.requests) == 2


ERRORS: list[tuple[web.Response, int, str]] = [
    (web.json_response({"error": {"message": f"bad key {KEY}"}}, status=401), 502, "refused our key"),
    (web.json_response({"error": {"message": f"no, {KEY}"}}, status=400), 400, r"no, \(the key\)"),
    (web.json_response({"error": {"message": "maximum context"}}, status=400), 400, "maximum context"),
    (web.json_response({"error": {"message": f"slow down {KEY}"}}, status=429), 503, "answered 429"),
    (web.Response(text=f"<b>{KEY}", status=500), 503, "answered 500"),
    (web.Response(text=f"<b>{KEY}"), 502, "no chat completion"),
    (web.json_response({"choices": []}), 502, "missing or cut off"),
    (web.json_response({"error": {"message": KEY}}), 502, "an error instead"),
    (web.HTTPFound("http://127.0.0.1:1/"), 502, "answered 302"),
]


async def test_errors_are_the_gateways_and_never_have_the_key(
    tmp_path: Path, byte_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = iter(ERRORS)
    async with (
        outside_chat(lambda request: next(answers)[0]) as outside,
        judged(tmp_path, byte_model, outside) as setup,
    ):
        claim = await claim_of(setup)
        for _, status, said in ERRORS:
            reply = await asked(setup, claim.openai_api_key)
            assert reply.status_code == status, reply.text
            assert re.search(said, reply.text), reply.text
            assert KEY not in reply.text
            assert outside.url.split("//")[1].split("/")[0] not in reply.text
        assert await calls_of_result(setup, claim) == []
    assert KEY not in caplog.text
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


async def asked(
    setup: Setup, key: str, text: str = "good?", path: str = "/v1", **more: Any
) -> httpx.Response:
    return await setup.http.post(
        f"{path}/chat/completions",
        json={"model": "judge", "messages": [{"role": "user", "content": text}]} | more,
        headers={"Authorization": f"Bearer {key}"},
    )


async def test_calls_and_timeouts_of_a_role_use_up_what_the_claim_may(
    tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may charge for what timed out."""
    monkeypatch.setattr("tinkerscript.gateway.outside_model.MAX_TIMEOUTS", 2)
    async with (
        outside_chat(lambda request: "fine") as outside,
        judged(tmp_path, byte_model, outside, call_timeout_s=0.2, totals=Totals(calls=2)) as setup,
    ):
        key = (await claim_of(setup)).openai_api_key
        assert (await asked(setup, key)).status_code == 200
        outside.go.clear()
        for text in ("one", "two"):
            reply = await asked(setup, key, text)
            assert (reply.status_code, "the role 'judge'" in reply.text) == (504, True)
        refused = await asked(setup, key, "three")
        assert (refused.status_code, "have timed out" in refused.text) == (403, True)
        assert [(await setup.call(key)).status_code for _ in range(2)] == [200, 403]
        assert len(outside.requests) == 3


async def test_what_was_asked_for_is_recorded_though_its_caller_left(
    tmp_path: Path, byte_model: Path
) -> None:
    async with (
        outside_chat(lambda request: "yes") as outside,
        judged(tmp_path, byte_model, outside) as setup,
    ):
        claim = await claim_of(setup)
        outside.go.clear()
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                await setup.http.post(
                    "/v1/chat/completions",
                    json={"model": "judge", "messages": [{"role": "user", "content": "x"}], "stream": stream},
                    headers={"Authorization": f"Bearer {claim.openai_api_key}"},
                    timeout=0.3,
                )
        outside.go.set()
        again = await asked(setup, claim.openai_api_key)  # The others have been answered before it.
        assert again.status_code == 200
        calls = await calls_of_result(setup, claim)
        assert [call.role for call in calls] == ["judge"] * 3


async def test_gateway_processes_ask_it_too(tmp_path: Path, byte_model: Path) -> None:
    async with (
        outside_chat(lambda request: "fine") as outside,
        judged(tmp_path, byte_model, outside, processes=2) as setup,
    ):
        for name in ("a", "b", "c"):
            claim = await claim_of(setup, name)
            path = claim.openai_base_url
            reply = await asked(setup, claim.openai_api_key, path=path)
            assert reply.json()["choices"][0]["message"]["content"] == "fine"
            assert (await asked(setup, claim.openai_api_key, path=path, model="critic")).status_code == 404
            assert [call.role for call in await calls_of_result(setup, claim)] == ["judge"]
        assert outside.keys == {f"Bearer {KEY}"}


async def test_a_retry_gets_the_reply_that_was_recorded_also_after_a_restart(
    tmp_path: Path, byte_model: Path
) -> None:
    answers = iter(range(9))
    async with outside_chat(lambda request: str(next(answers))) as outside:
        async with judged(tmp_path, byte_model, outside) as setup:
            claim = await claim_of(setup)
            headers = {"Authorization": f"Bearer {claim.openai_api_key}", "Idempotency-Key": "one"}
            body = {"model": "judge", "messages": [{"role": "user", "content": "x"}]}
            first = await setup.http.post("/v1/chat/completions", json=body, headers=headers)
        async with judged(tmp_path, byte_model, outside) as setup:
            again = await setup.http.post("/v1/chat/completions", json=body, headers=headers)
        assert again.json()["choices"] == first.json()["choices"]
        assert again.json()["id"] == first.json()["id"]
    assert len(outside.requests) == 1


FORGED_NAMES = ["Judge", "judge ", "judge\u200b", "jud\u0261e", "judge\x00", "models/judge", "big", ""]


async def test_no_forged_name_reaches_a_role(tmp_path: Path, byte_model: Path) -> None:
    async with outside_chat(lambda request: "no") as outside, judged(tmp_path, byte_model, outside) as setup:
        key = (await claim_of(setup)).openai_api_key
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "X-Role": "judge"}
        messages = [{"role": "user", "content": "hi"}]
        for name, path in product(FORGED_NAMES, ("chat/completions", "responses", "messages")):
            said = {"input": "hi"} if path == "responses" else {"messages": messages}
            text = json.dumps({"model": name, "max_tokens": 5} | said)
            # With two names, all readers must agree on which counts.
            for body in (text, '{"model": "judge", ' + text[1:]):
                reply = await setup.http.post(f"/v1/{path}", content=body, headers=headers)
                assert reply.status_code >= 400, (name, path, reply.text)
        assert outside.requests == []


async def test_names_addresses_and_keys_that_cannot_be_are_refused(tmp_path: Path, byte_model: Path) -> None:
    data = run_config(byte_model).model_dump()
    judge = {"kind": "outside", "base_url": "http://localhost:1", "model": "big"}
    for name in ("policy", "side", "Judge", "a/b", "", "x" * 65):
        with pytest.raises(ValueError, match="a role's name starts with"):
            RunConfig.model_validate(data | {"roles": {name: judge}})
    with pytest.raises(ValueError, match="password"):
        RunConfig.model_validate(data | {"roles": {"judge": judge | {"base_url": "http://a:b@localhost"}}})
    config = RunConfig.model_validate(data | {"roles": {"judge": judge | {"api_key_env": "JUDGE_KEY"}}})
    with pytest.raises(ConfigError, match=r"roles\.judge\.api_key_env: .* JUDGE_KEY is not set"):
        async with running_server(config, tmp_path, environ={}, times=FAST):
            pass
