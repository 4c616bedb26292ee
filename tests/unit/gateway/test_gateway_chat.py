"""Chat completions over the ASGI application: tokens, parameters, refusals, claims."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from asgi_caller import AsgiCaller
from chat_families import FAMILIES
from gateway_bench import CLAIM, Bench, WaitingSampler
from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import full_prompts, unpack_ids
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
    refuse_unsupported,
)
from tinkerscript.testing import ScriptedSampler
from tiny_tokenizer import write_model_folder

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
]


async def test_reply_is_openais(bench: Bench) -> None:
    reply = await bench.ask()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"
    assert reply["system_fingerprint"] == "policy-3"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = len(bench.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    assert reply["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
    }
    (call,) = bench.calls
    assert reply["id"] == f"chatcmpl-{call.call_id}"
    assert (call.policy_version, call.temperature, call.logprob_kind) == (3, 0.5, "processed")
    assert (len(call.sampled) // 4, call.fork_reason) == (6, None)


async def test_turns_extend_token_by_token_and_a_fork_is_labelled(bench: Bench) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        reply = await bench.ask(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    calls = bench.calls
    prompts = full_prompts(calls)
    assert [prompts[call.call_id] for call in calls] == [request.prompt for request in bench.sampler.requests]
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    edited = [messages[0], {"role": "assistant", "content": "never said"}, messages[2]]
    await bench.ask(edited)
    assert bench.calls[-1].fork_reason == "history_edited"


async def test_a_call_records_the_experts_of_what_is_new_in_it(bench: Bench) -> None:
    """Here they are each token's position, so those of a turn follow the turn before."""

    class Mixture(ScriptedSampler):
        def _one(self, request: SampleRequest) -> SampledSequence:
            sequence = super()._one(request)
            end = (len(request.prompt) + len(sequence.sampled)) // 4
            experts = b"".join(position.to_bytes(2, "little") for position in range(request.known, end))
            return structs.replace(sequence, experts=experts)

    bench.use(Mixture(bench.sampler._script))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        reply = await bench.ask(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    (rollout,) = merge_calls(bench.calls, episode_uuid="e")
    assert rollout.experts is not None
    assert rollout.experts.view("<u2")[:, 0].tolist() == list(range(len(rollout.tokens)))


async def test_a_conversation_continues_after_a_restart(bench: Bench, byte_model: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    first = await bench.ask(messages, tools=TOOLS)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
    restarted = Bench(byte_model, bench.claims)
    await restarted.ask(messages, tools=TOOLS)
    calls = bench.calls
    assert calls[1].parent_id == calls[0].call_id
    restarted.gateway.forget("episode", 1)
    await restarted.ask(messages, tools=TOOLS)
    assert bench.calls[2].parent_id == calls[0].call_id
    await restarted.client.aclose()


async def test_n_samples_share_prompt_and_parent(bench: Bench) -> None:
    answers = iter("abc")
    bench.answer = lambda prompt: next(answers, "d")
    first = await bench.ask(n=3, return_token_ids=True)
    assert [choice["message"]["content"] for choice in first["choices"]] == ["a", "b", "c"]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    second = first["choices"][1]["message"]
    await bench.ask([{"role": "user", "content": "hi"}, second, {"role": "user", "content": "x"}])
    calls = bench.calls
    assert len({call.call_id for call in calls}) == 4
    assert calls[3].parent_id == calls[1].call_id
    assert len(bench.sampler.requests) == 2
    assert unpack_ids(bench.sampler.requests[0].prompt).tolist() == first["prompt_token_ids"]
    assert [choice["token_ids"] for choice in first["choices"]] == [
        call.sampled_ids.tolist() for call in calls[:3]
    ]


async def test_tool_calls_and_their_results(bench: Bench) -> None:
    bench.answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    first = (await bench.ask(tools=TOOLS, max_tokens=100))["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    (call,) = first["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": "é"}'}
    assert first["message"]["content"] is None
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    bench.answer = "3"
    await bench.ask([{"role": "user", "content": "hi"}, first["message"], result], tools=TOOLS)
    calls = bench.calls
    assert calls[1].parent_id == calls[0].call_id
    prompt = bench.tokenizer.decode(calls[0].new_prompt_ids.tolist())
    assert '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}' in prompt
    assert "<tool_response>\n3\n</tool_response>" in bench.tokenizer.decode(calls[1].new_prompt_ids.tolist())


async def test_without_tools_tool_calls_stay_text(bench: Bench) -> None:
    bench.answer = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await bench.ask(max_tokens=100, **fields))["choices"][0]
        assert choice["message"]["content"] == bench.answer
        assert choice["finish_reason"] == "stop"


async def test_parameters_reach_the_sampler(bench: Bench) -> None:
    await bench.ask(
        temperature=0.7, top_p=0.9, top_k=5, seed=11, stop=["x", "y"], max_completion_tokens=7, user="u"
    )
    asked = bench.sampler.requests[-1]
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.7, 0.9, 5, 11)
    assert (asked.stop, asked.max_tokens) == (["x", "y"], 7)
    await bench.ask(temperature=0, stop="z", max_tokens=9, top_k=0, metadata={"a": "b"}, store=False)
    asked = bench.sampler.requests[-1]
    assert (asked.temperature, asked.stop, asked.max_tokens, asked.top_k) == (0, ["z"], 9, -1)
    await bench.ask(stop=None, temperature=None, frequency_penalty=0, response_format={"type": "text"})
    asked = bench.sampler.requests[-1]
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.max_tokens) == (
        0.5,
        1.0,
        -1,
        None,
        20,
    )


async def test_length_is_capped_by_what_the_context_has_left(tmp_path: Path) -> None:
    bench = Bench(write_model_folder(tmp_path, max_context=64))
    bench.answer = "y" * 100
    used = (await bench.ask("x" * 20, max_tokens=1))["usage"]["prompt_tokens"]
    reply = await bench.ask("x" * 20, max_tokens=1000)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 64
    assert bench.sampler.requests[-1].max_tokens == 64 - used
    response = await bench.post("x" * 64)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"
    await bench.client.aclose()


async def test_logprobs_name_every_sampled_token(bench: Bench) -> None:
    bench.answer = "é"
    entries = (await bench.ask(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], list(b"<|im_end|>")]
    assert entries[0]["token"] == "\N{REPLACEMENT CHARACTER}"
    assert {entry["logprob"] for entry in entries} == {-0.5}
    told = [entry["token_id"] for entry in entries]
    with_ids = (await bench.ask(logprobs=True, return_token_ids=True))["choices"][0]
    assert told == [entry["token_id"] for entry in with_ids["logprobs"]["content"]] == with_ids["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
            "unsupported_parameter",
        ),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "unsupported_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "cache": 1}]},
            "messages[0].cache",
            "unknown_parameter",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "unsupported_content",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(
    bench: Bench, fields: dict[str, Any], param: str, code: str
) -> None:
    response = await bench.post(**fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert param.split(".")[-1].split("[")[0] in error["message"] or code == "unsupported_content"
    assert bench.sampler.requests == []


async def test_no_body_no_model_no_key(bench: Bench) -> None:
    broken = await bench.client.post("/v1/chat/completions", content=b"{nope")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    for name in ("tiny", "policy", bench.folder.name, "fill_whatever_model"):
        reply = await bench.post(model=name)
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny")
    for headers in ({"Authorization": "Bearer other"}, {"Authorization": "Basic key"}, {"Authorization": ""}):
        for refused in (
            await bench.client.post("/v1/chat/completions", json={}, headers=headers),
            await bench.client.get("/v1/models", headers=headers),
        ):
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
    models = (await bench.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]][:2] == ["tiny", "policy"]


async def test_a_lost_claim_is_final(bench: Bench) -> None:
    def lose(prompt: list[int]) -> str:
        bench.claims.lose(CLAIM, "the lease ran out")
        return "late"

    bench.answer = lose
    for _ in ("while sampling", "before"):
        response = await bench.post()
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "claim_lost"
        assert response.json()["error"]["message"] == "the lease ran out"
        assert response.headers["x-should-retry"] == "false"
    assert bench.calls == []


class RefusingSampler(Sampler):
    """An engine that is unavailable."""

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise GatewayError(503, "engine_unavailable", "the engine is away")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unavailable_engine_is_a_503_with_retry_after(bench: Bench, stream: bool) -> None:
    bench.use(RefusingSampler())
    response = await bench.post(stream=stream)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    assert response.json()["error"]["type"] == "server_error"
    assert bench.calls == []


async def test_a_client_that_goes_away_cancels_its_sample(bench: Bench) -> None:
    sampler = WaitingSampler()
    bench.use(sampler)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    caller = AsgiCaller(bench.app, "/v1/chat/completions", body, {"authorization": "Bearer key"})
    running = asyncio.create_task(caller.run())
    await sampler.started.wait()
    caller.hang_up()
    await running
    assert sampler.cancelled.is_set()
    assert bench.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_ends_a_reply_is_no_part_of_its_text(bench: Bench, stream: bool) -> None:
    """Its turn goes on from the sampled ids all the same."""
    colon = bench.tokenizer.encode(":")[0]
    sampled = bench.tokenizer.encode("Observation:")
    bench.use(ScriptedSampler(lambda _: sampled))
    response = await bench.post(stop_token_ids=[colon], stream=stream)
    (call,) = bench.calls
    if stream:
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(c["delta"].get("content") or "" for event in data for c in event["choices"])
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert (text, call.sampled_ids.tolist(), call.stop_reason) == ("Observation", sampled, "stop")
    said = [{"role": "assistant", "content": text}, {"role": "user", "content": "it rains"}]
    await bench.ask([{"role": "user", "content": "hi"}, *said])
    assert bench.calls[1].parent_id == call.call_id


async def test_what_the_sampler_is_asked_for_is_recorded(bench: Bench) -> None:
    end = bench.tokenizer.convert_tokens_to_ids("<|im_end|>")
    await bench.ask(min_p=0.2, repetition_penalty=1.1, stop_token_ids=[7, end])
    (request,) = bench.sampler.requests
    assert (request.min_p, request.repetition_penalty, request.extra_stop_ids) == (0.2, 1.1, [7])
    (call,) = bench.calls
    assert (call.min_p, call.repetition_penalty) == (0.2, 1.1)
    assert (await bench.post(chat_template_kwargs={})).status_code == 200


async def test_a_request_may_name_the_runs_arguments_of_the_chat_template_and_no_others(
    tmp_path: Path,
) -> None:
    thinkless = {"enable_thinking": False}
    bench = Bench(FAMILIES["qwen3"].write(tmp_path), chat_template_kwargs=thinkless)
    reply = await bench.ask(chat_template_kwargs=thinkless, return_token_ids=True)
    prompt = bench.tokenizer.decode(reply["prompt_token_ids"])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for other in ({"enable_thinking": True}, {"enable_thinking": None}, {"custom": []}):
        refused = await bench.post(chat_template_kwargs=other)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
        assert "engine.chat_template_kwargs" in refused.json()["error"]["message"]
    assert len(bench.calls) == 1
    await bench.client.aclose()


def test_an_engine_refuses_what_it_does_not_know_by_name() -> None:
    for field, fields in {
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "stop_token_ids": {"stop": ["x"], "extra_stop_ids": [3]},
    }.items():
        request = SampleRequest(prompt=b"", max_tokens=1, **fields)
        with pytest.raises(GatewayError, match=f"{field} is not supported by it") as caught:
            refuse_unsupported(request, "it", constraints=True, top_logprobs=True)
        assert (caught.value.status, caught.value.param) == (400, field)
