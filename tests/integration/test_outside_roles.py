"""Roles that an outside server answers, through a whole server: every dialect, records, limits, secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from inspect_ai.dataset import Sample

from inspect_tinker_bridge.conversion import sample_summary
from interchange_helpers import FAST, collect, new_episode, new_episodes, run_config, trainer
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


async def test_a_server_that_is_slow_or_gone_is_named(tmp_path: Path, byte_model: Path) -> None:
    async with (
        outside_chat(lambda request: "late") as outside,
        judged(tmp_path, byte_model, outside, call_timeout_s=0.2) as setup,
    ):
        outside.go.clear()
        claim = await claim_of(setup)
        first, second = await asyncio.gather(
            *(asked(setup, claim.openai_api_key, text) for text in ("one", "two"))
        )
        assert (first.status_code, second.status_code) == (504, 504)
        assert "the role 'judge'" in first.text
        last = 0
        for number in range(20):
            last = (await asked(setup, claim.openai_api_key, str(number))).status_code
            if last == 403:
                break
        assert last == 403  # A server may charge for what timed out.


async def test_calls_of_a_role_use_up_the_claims_limit(tmp_path: Path, byte_model: Path) -> None:
    async with (
        outside_chat(lambda request: "ok") as outside,
        judged(tmp_path, byte_model, outside, totals=Totals(calls=3)) as setup,
    ):
        claim = await claim_of(setup)
        codes = [(await asked(setup, claim.openai_api_key, str(n))).status_code for n in range(4)]
        assert codes == [200, 200, 200, 403]
        assert (await setup.call(claim.openai_api_key)).status_code == 403
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


async def test_a_key_that_is_not_set_is_said_at_the_start(tmp_path: Path, byte_model: Path) -> None:
    data = run_config(byte_model).model_dump()
    role = {"kind": "outside", "base_url": "http://localhost:1", "model": "big", "api_key_env": "JUDGE_KEY"}
    config = RunConfig.model_validate(data | {"roles": {"judge": role}})
    with pytest.raises(ConfigError, match=r"roles\.judge\.api_key_env: .* JUDGE_KEY is not set"):
        async with running_server(config, tmp_path, environ={}, times=FAST):
            pass


FORGED_NAMES = [
    *(
        "Judge",
        "JUDGE",
        "judge ",
        " judge",
        "judge\u200b",
        "jud\u0261e",
        "\uff4audge",
        "judge\x00",
        "judge\n",
    ),
    *("judge/", "../judge", "judge%20", "%6audge", "models/judge", "judge:latest", "judge?x=1", "judge#"),
    *(
        "policy/judge",
        "policy\rjudge",
        "critic",
        "big",
        "",
        "null",
        "judge\u0301",
        "\u202ejudge",
        "roles.judge",
    ),
]
FORGED_HEADERS: list[dict[str, str]] = [
    *({name: "judge"} for name in ("X-Role", "X-Model", "OpenAI-Organization", "X-Forwarded-Host", "Host")),
    *({"X-Original-URL": "/v1/judge"}, {"Idempotency-Key": "judge"}, {}),
]
FORGED_PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/agent/v1/chat/completions", "/agent/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses/input_tokens", "/v1/judge/chat/completions", "/judge/v1/chat/completions"),
    *("/v1/../judge/v1/chat/completions", "/g/1/v1/chat/completions"),
]


async def test_hundreds_of_forged_attempts_reach_no_role_and_see_no_key(
    tmp_path: Path, byte_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    rng = random.Random(7)
    seen = list[bytes]()
    async with (
        outside_chat(lambda request: "THE JUDGE SPOKE") as outside,
        judged(tmp_path, byte_model, outside) as setup,
    ):
        claim, lost = await claim_of(setup, "a"), await claim_of(setup, "b")
        await setup.end(lost)
        own, over = claim.openai_api_key, lost.openai_api_key
        forged_keys = [*(KEY, over, own[:-1], own + "x", own.upper(), own[::-1]), "judge", f"{own},{KEY}"]
        for number in range(300):
            if number % 2:  # The true name, without a claim that is held.
                name, key = "judge", rng.choice(forged_keys)
            else:
                name, key = rng.choice(FORGED_NAMES), own
            path = rng.choice(FORGED_PATHS)
            body: dict[str, Any] = {"model": name, "max_tokens": 5}
            body |= (
                {"messages": [{"role": "user", "content": "hi"}]} if "resp" not in path else {"input": "hi"}
            )
            if path.endswith("/completions") and "chat" not in path:
                body = {"model": name, "prompt": "hi"}
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            headers |= rng.choice(FORGED_HEADERS)
            text = json.dumps(body, ensure_ascii=bool(number % 3))
            if number % 5 == 0:  # Two names: readers must agree on which counts.
                text = '{"model": "judge", ' + text[1:]
            reply = await setup.http.post(path, content=text.encode(), headers=headers)
            assert reply.status_code >= 400, (name, path, reply.text)
            seen.append(reply.content)
        assert outside.requests == []
        seen.append((await setup.http.get("/metrics")).content)
        seen.append((await setup.http.get("/openapi.json")).content)
        assert (await asked(setup, own)).json()["choices"][0]["message"]["content"] == "THE JUDGE SPOKE"
        outcomes = await collect(setup.link, 1)
        assert set(outcomes) == {lost.episode_uuid}
        assert [call.role for call in await calls_of_result(setup, claim)] == ["judge"]
    assert not any(b"JUDGE SPOKE" in each or KEY.encode() in each for each in seen)
    assert KEY not in caplog.text
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_names_and_addresses_that_cannot_be_are_refused(byte_model: Path) -> None:
    data = run_config(byte_model).model_dump()
    judge = {"kind": "outside", "base_url": "http://localhost:1", "model": "big"}
    for name in ("policy", "side", "Judge", "a/b", "", "x" * 65):
        with pytest.raises(ValueError, match="a role's name starts with"):
            RunConfig.model_validate(data | {"roles": {name: judge}})
    with pytest.raises(ValueError, match="password"):
        RunConfig.model_validate(data | {"roles": {"judge": judge | {"base_url": "http://a:b@localhost"}}})


GRADED = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate, solver

@solver
def hinted():
    async def solve(state, generate):
        state.user_prompt.text = (await get_model(role="judge").generate("A hint?")).completion
        return state
    return solve

@scorer(metrics=[accuracy()])
def judged():
    async def score(state, target):
        verdict = await get_model(role="judge").generate(f"How good is {state.output.completion}?")
        return Score(value=float(len(verdict.completion)))
    return score

@task
def graded():
    return Task(dataset=[Sample(input="1+1", id=1)], solver=[hinted(), generate()], scorer=judged())
"""


async def test_a_worker_that_is_told_nothing_gives_inspect_the_runs_roles(
    tmp_path: Path, byte_model: Path
) -> None:
    """As a process on its own: what the judge says does not train."""
    (tmp_path / "run").mkdir()
    (tmp_path / "graded.py").write_text(GRADED, encoding="utf-8")
    task = f"{tmp_path / 'graded.py'}@graded"
    sample = sample_summary(Sample(input="1+1", id=1))
    payload = json.dumps({"task": "graded.py@graded", "sample": sample}).encode()
    async with (
        outside_chat(lambda request: "fine") as outside,
        judged(tmp_path / "run", byte_model, outside) as setup,
    ):
        await setup.link.register([new_episode("a", payload=payload), new_episode("b", payload=payload)])
        command = [sys.executable, "-m", "tinkerscript", "worker", "--task", task, "--server", setup.url]
        worker = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        try:
            outcomes = (await collect(setup.link, 2)).values()
        finally:
            worker.send_signal(signal.SIGINT)
            _, said = await worker.communicate()
        for outcome in outcomes:
            assert isinstance(outcome, EpisodeAccepted), said.decode()
            assert outcome.reward == len("fine")
            assert [call.role for call in outcome.all_calls] == ["judge", "", "judge"]
            (rollout,) = merge_calls(outcome.all_calls, episode_uuid=outcome.episode_uuid)
            assert [segment.call.role for segment in rollout.segments] == [""]
        texts = [request["messages"][-1]["content"] for request in outside.requests]
        assert sorted(text[:8] for text in texts) == ["A hint?", "A hint?", "How good", "How good"]
