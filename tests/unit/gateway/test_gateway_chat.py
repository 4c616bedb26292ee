"""Chat completions over the ASGI application: tokens, parameters, refusals, claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from chat_families import FAMILIES
from gateway_bench import Bench
from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import (
    SampledSequence,
    SampleRequest,
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
    totals = {"completion_tokens": 6, "total_tokens": prompt_tokens + 6}
    assert reply["usage"] == {"prompt_tokens": prompt_tokens} | totals
    (call,) = bench.calls
    assert reply["id"] == f"chatcmpl-{call.call_id}"
    assert (call.policy_version, call.temperature, call.logprob_kind) == (3, 0.5, "processed")
    assert (len(call.sampled) // 4, call.fork_reason) == (6, None)


async def test_a_call_records_the_experts_of_what_is_new_in_it(bench: Bench) -> None:
    """Here they are each token's position, so those of a turn follow the turn before."""

    class Mixture(ScriptedSampler):
        def _one(self, request: SampleRequest) -> SampledSequence:
            sequence = super()._one(request)
            end = (len(request.prompt) + len(sequence.sampled)) // 4
            experts = b"".join(position.to_bytes(2, "little") for position in range(request.known, end))
            return structs.replace(sequence, experts=experts)

    bench.sampler = Mixture(bench.sampler._script)
    bench.use(bench.sampler)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        reply = await bench.ask(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    bench.check_one_sequence(turns=3)
    (rollout,) = merge_calls(bench.calls, episode_uuid="e")
    assert rollout.experts is not None
    assert rollout.experts.view("<u2")[:, 0].tolist() == list(range(len(rollout.tokens)))


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
    def asked() -> list[Any]:
        names = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens")
        return [getattr(bench.sampler.requests[-1], name) for name in names]

    await bench.ask(temperature=0.7, top_p=0.9, top_k=5, seed=11, stop=["x", "y"], max_completion_tokens=7)
    assert asked() == [0.7, 0.9, 5, 11, ["x", "y"], 7]
    await bench.ask(temperature=0, stop="z", max_tokens=9, top_k=0)
    assert asked() == [0, 1.0, -1, None, ["z"], 9]
    await bench.ask(stop=None, temperature=None)
    assert asked() == [0.5, 1.0, -1, None, [], 20]


async def test_length_is_capped_by_what_the_context_has_left(tmp_path: Path) -> None:
    bench = Bench(write_model_folder(tmp_path, max_context=64))
    bench.answer = "y" * 100
    used = (await bench.ask("x" * 20, max_tokens=1))["usage"]["prompt_tokens"]
    reply = await bench.ask("x" * 20, max_tokens=1000)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 64
    assert bench.sampler.requests[-1].max_tokens == 64 - used
    response = await bench.post("x" * 64)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"
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


async def test_no_body_no_model_no_key(bench: Bench) -> None:
    broken = await bench.client.post("/v1/chat/completions", content=b"{nope")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    for name in ("tiny", "policy", bench.folder.name, "fill_whatever_model"):
        reply = await bench.post(model=name)
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny")
    for value in ("Bearer other", "Basic key", ""):
        headers = {"Authorization": value}
        for refused in (
            await bench.client.post("/v1/chat/completions", json={}, headers=headers),
            await bench.client.get("/v1/models", headers=headers),
        ):
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
    models = (await bench.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]][:2] == ["tiny", "policy"]


@pytest.mark.usefixtures("lose_claim")
async def test_a_lost_claim_is_final(bench: Bench) -> None:
    for _ in ("while sampling", "before"):
        response = await bench.post()
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (409, "claim_lost")
        assert error["message"] == "the lease ran out"
        assert response.headers["x-should-retry"] == "false"
    assert bench.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unavailable_engine_is_a_503_with_retry_after(bench: Bench, stream: bool) -> None:
    def away(prompt: list[int]) -> str:
        raise GatewayError(503, "engine_unavailable", "the engine is away")

    bench.answer = away
    response = await bench.post(stream=stream)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.json()["error"]["type"] == "server_error"
    assert bench.calls == []


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
