"""OpenAI Responses over the ASGI application: items, parameters, refusals, events."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway_bench import CLAIM, Bench, LimitedSampler
from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.dialects import Responses
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.gateway.endpoint import create_gateway
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler
from tinkerscript.tokenizer import LightTokenizer

TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CALLS = "".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": "é"}}}}\n</tool_call>' for a in (1, 2.0)
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def dialect(byte_model: Path) -> Responses:
    return Responses(LightTokenizer(byte_model))


async def post(bench: Bench, items: Any = "hi", **fields: Any) -> httpx.Response:
    body = {"model": "policy", "input": items} | fields
    return await bench.client.post("/v1/responses", json=body)


async def ask(bench: Bench, items: Any = "hi", **fields: Any) -> dict[str, Any]:
    """The response, streamed or whole: the last event of a stream repeats it."""
    response = await post(bench, items, **fields)
    assert response.status_code == 200, response.text
    reply = events_of(response.text)[-1]["response"] if fields.get("stream") else response.json()
    Response.model_validate(reply)
    return reply


def events_of(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def parsed(dialect: Responses, items: Any, **fields: Any) -> ModelCall:
    return dialect.parse(json.dumps({"model": "policy", "input": items} | fields).encode())


async def test_a_response_is_openais(bench: Bench) -> None:
    bench.answer = "<think>\nhm\n</think>\n\nhello"
    reply = await ask(
        bench, instructions="Be kind.", metadata={"k": "v"}, temperature=0.7, max_output_tokens=99
    )
    (call,) = bench.calls
    assert reply["id"] == f"resp_{call.call_id}"
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "tiny")
    assert (reply["instructions"], reply["metadata"]) == ("Be kind.", {"k": "v"})
    assert (reply["temperature"], reply["max_output_tokens"]) == (0.7, 99)
    assert reply["output"] == [
        {
            "id": f"rs_{call.call_id}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "status": "completed",
        },
        {
            "id": f"msg_{call.call_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
        },
    ]
    sampled = len(call.sampled_ids)
    assert reply["usage"] == {
        "input_tokens": len(call.new_prompt_ids),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": sampled - len("\n\nhello") - 1},
        "total_tokens": len(call.new_prompt_ids) + sampled,
    }
    prompt = bench.tokenizer.decode(call.new_prompt_ids.tolist())
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_reply_that_was_cut_off_is_incomplete(bench: Bench) -> None:
    bench.answer = "<think>\nfor ever"
    reply = await ask(bench, max_output_tokens=5)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["output"][-1]["status"] == "incomplete"
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    *_, last = events_of((await post(bench, max_output_tokens=5, stream=True)).text)
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


def interleaved(output: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every call's output right after the call."""
    calls = [item for item in output if item["type"] == "function_call"]
    others = [item for item in output if item["type"] != "function_call"]
    return others + [item for pair in zip(calls, results, strict=True) for item in pair]


def without(output: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [item for item in output if item["type"] not in kinds]


SENT_BACK = {
    "as it came": lambda output, results: output + results,
    "without reasoning": lambda output, results: without(output, "reasoning") + results,
    "interleaved": interleaved,
    "without ids": lambda output, results: (
        [{k: v for k, v in item.items() if k not in ("id", "status")} for item in output] + results
    ),
    "with nulls": lambda output, results: (
        [item | {"async_": None, "namespace": None, "phase": None} for item in output] + results
    ),
    "reasoning encrypted": lambda output, results: (
        [{k: v for k, v in item.items() if item["type"] != "reasoning" or k != "content"} for item in output]
        + results
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", SENT_BACK)
async def test_an_unedited_conversation_is_one_sequence(bench: Bench, way: str, stream: bool) -> None:
    """Two turns with reasoning, text and two tool calls each, then text."""
    fields: dict[str, Any] = {
        "tools": [TOOL],
        "instructions": "Add.",
        "max_output_tokens": 300,
        "stream": stream,
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    items: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(2):
        bench.answer = f"<think>\nhm \n</think>\n\nso {CALLS}"
        reply = await ask(bench, items, **fields)
        kinds = [item["type"] for item in reply["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
            for item in reply["output"][2:]
        ]
        items += SENT_BACK[way](reply["output"], results)
    bench.answer = "done"
    await ask(bench, items, **fields)
    items += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"}]
    await ask(bench, items, **fields)
    bench.check_one_sequence(turns=4)


def test_answers_of_different_responses_in_a_row_stay_apart(dialect: Responses) -> None:
    ids = [f"msg_{digit * 32}" for digit in "ab"]
    output = [
        {
            "id": each,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": each[-1]}],
        }
        for each in ids
    ]
    messages = parsed(dialect, [*output, {"role": "user", "content": "x"}]).messages
    assert [message["content"] for message in messages] == ["a", "b", "x"]
    unnamed = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert parsed(dialect, unnamed).messages == unnamed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_previous_response_id(bench: Bench, byte_model: Path, stream: bool) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 300, "stream": stream}
    bench.answer = f"<think>\nhm\n</think>\n\nso {CALLS}"
    first = await ask(bench, instructions="Add.", store=False, **fields)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": [part("input_text", "3")]}
        for item in first["output"][2:]
    ]
    bench.answer = "done"
    second = await ask(bench, results, instructions="Add.", previous_response_id=first["id"], **fields)
    assert second["previous_response_id"] == first["id"]
    bench.check_one_sequence(turns=2)
    restarted = Bench(byte_model, bench.claims)
    await ask(restarted, "more", instructions="Add.", previous_response_id=second["id"], **fields)
    assert bench.calls[2].parent_id == bench.calls[1].call_id
    # Instructions are for one response: without them the conversation is another one.
    await ask(restarted, "more", previous_response_id=second["id"], **fields)
    last = bench.calls[3]
    assert last.parent_id is None
    prompt = bench.tokenizer.decode(last.new_prompt_ids.tolist())
    assert "Add." not in prompt
    assert prompt.count("<tool_response>\n3\n</tool_response>") == 2
    await restarted.client.aclose()


async def test_a_response_of_another_claim_is_not_found(bench: Bench) -> None:
    response = await post(bench, previous_response_id="resp_" + "0" * 32)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "previous_response_not_found")
    assert error["param"] == "previous_response_id"
    assert (await post(bench, previous_response_id="chatcmpl-1")).json()["error"]["code"] == "invalid_value"


def part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


async def test_a_stream_tells_the_response_step_by_step(bench: Bench) -> None:
    bench.answer = f"<think>\nhm\n</think>\n\nso {CALLS}"
    response = await post(bench, tools=[TOOL], max_output_tokens=300, stream=True)
    events = events_of(response.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    letters = ["output_text.delta"] * 2
    added, done = "output_item.added", "output_item.done"
    assert kinds == [
        *("created", "in_progress"),
        *(added, "content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done"),
        *("content_part.done", done),
        *(added, "content_part.added", *letters, "output_text.done", "content_part.done", done),
        *(added, "function_call_arguments.delta", "function_call_arguments.done", done) * 2,
        "completed",
    ]
    whole = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == f"response.{done}"] == whole["output"]
    assert [e["output_index"] for e in events if e["type"] == f"response.{added}"] == [0, 1, 2, 3]
    for kind, text in (("output_text", "so"), ("reasoning_text", "hm")):
        told = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(told) == text
    opening = events[0]["response"]
    assert (opening["status"], opening["output"], opening["usage"]) == ("in_progress", [], None)
    assert {e["item_id"] for e in events if e["type"] == "response.output_text.delta"} == {
        whole["output"][1]["id"]
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_ids_and_logprobs_on_request(bench: Bench, stream: bool) -> None:
    bench.answer = "é!"
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "return_token_ids": True}
    response = await post(bench, stream=stream, **fields)
    (call,) = bench.calls
    reply = events_of(response.text)[-1]["response"] if stream else response.json()
    assert reply["token_ids"] == call.sampled_ids.tolist()
    assert reply["prompt_token_ids"] == call.new_prompt_ids.tolist()
    entries = reply["output"][0]["content"][0]["logprobs"]
    assert [entry["token_id"] for entry in entries] == call.sampled_ids.tolist()
    assert {entry["logprob"] for entry in entries} == {-0.5}
    if stream:
        deltas = [e for e in events_of(response.text) if e["type"] == "response.output_text.delta"]
        told = [entry["token_id"] for delta in deltas for entry in delta["logprobs"]]
        assert told == call.sampled_ids.tolist()[: len(told)]
        assert len(told) >= len(bench.tokenizer.encode("é!"))
    plain = await ask(bench)
    assert not {"token_ids", "prompt_token_ids"} & plain.keys()


async def test_encrypted_reasoning_is_the_reasoning(bench: Bench, dialect: Responses) -> None:
    bench.answer = "<think>\nhmé\n</think>\n\nhello"
    reply = await ask(bench, include=["reasoning.encrypted_content"])
    given = reply["output"][0]["encrypted_content"]
    assert base64.b64decode(given).decode() == "hmé"
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": given}
    assert parsed(dialect, [item]).messages[0]["reasoning_content"] == "hmé"
    foreign = item | {"encrypted_content": "gAAAAAB-not-ours"}
    error = (await post(bench, [foreign])).json()["error"]
    assert error["param"] == "input[0].encrypted_content"


async def test_parameters_reach_the_sampler(bench: Bench) -> None:
    await ask(bench, temperature=0.7, top_p=0.9, top_k=5, max_output_tokens=7)
    await ask(bench)
    request, default = bench.sampler.requests
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.7, 0.9, 5, 7)
    assert (default.temperature, default.top_p, default.top_k, default.max_tokens) == (0.5, 1.0, -1, 20)


async def test_the_prompt_is_counted_without_a_call(bench: Bench) -> None:
    first = await ask(bench, tools=[TOOL])
    items = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "more"}]
    counts = [
        await bench.client.post(
            "/v1/responses/input_tokens", json={"model": "policy", "tools": [TOOL], **body}
        )
        for body in ({"input": items}, {"input": "more", "previous_response_id": first["id"]})
    ]
    second = await ask(bench, items, tools=[TOOL])
    for count in counts:
        assert count.json() == {
            "object": "response.input_tokens",
            "input_tokens": second["usage"]["input_tokens"],
        }
    bench.check_one_sequence(turns=2)


REFUSED: dict[str, Any] = {
    "background": True,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "max_tool_calls": 3,
    "moderation": {"model": "m"},
    "prompt": {"id": "pmpt_1"},
    "service_tier": "flex",
    "truncation": "auto",
    "frequency_penalty": 1.0,
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_name(dialect: Responses, field: str) -> None:
    with pytest.raises(GatewayError, match=field) as refused:
        parsed(dialect, "hi", **{field: REFUSED[field]})
    assert (refused.value.status, refused.value.param) == (400, field)
    assert refused.value.code in ("unsupported_parameter", "unknown_parameter")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("reasoning.effort", {"reasoning": {"effort": "high"}}),
        ("reasoning.summary", {"reasoning": {"summary": "auto"}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "web_search_preview"}}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "sub"}, "tools": [TOOL]}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s"}}}),
        ("include", {"include": ["web_search_call.results"]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].type", {"tools": [{"type": "custom", "name": "f"}]}),
        ("tools[0].defer_loading", {"tools": [TOOL | {"defer_loading": True}]}),
        ("tools[0].async", {"tools": [TOOL | {"async": True}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input[0].type", {"items": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input[0].type", {"items": [{"id": "msg_1"}]}),
        ("input[0].type", {"items": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}),
        ("input[0].phase", {"items": [{"role": "assistant", "content": "x", "phase": "commentary"}]}),
        ("input[0].call_id", {"items": [{"type": "function_call_output", "output": "x"}]}),
        ("input[0].role", {"items": [{"role": "critic", "content": "x"}]}),
        ("input[0].mood", {"items": [{"role": "user", "content": "x", "mood": "good"}]}),
        (
            "input[0].content[0]",
            {"items": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        ),
        (
            "input[0].content[0]",
            {"items": [{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}]},
        ),
        (
            "input[0].output[0]",
            {
                "input": [
                    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}
                ]
            },
        ),
    ],
)
def test_a_part_that_is_not_honoured_is_refused_by_name(
    dialect: Responses, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(dialect, **({"items": "hi"} | fields))
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_fields_that_change_nothing_are_accepted(bench: Bench) -> None:
    plain = await ask(bench)
    reply = await ask(
        bench,
        background=False,
        conversation=None,
        include=[],
        metadata={"a": "b"},
        parallel_tool_calls=True,
        prompt_cache_key="k",
        reasoning={"effort": None},
        safety_identifier="s",
        service_tier="auto",
        store=True,
        text={"format": {"type": "text"}},
        tool_choice="auto",
        top_logprobs=0,
        truncation="disabled",
        user="u",
    )
    assert bench.sampler.requests[0] == bench.sampler.requests[1]
    assert [item["content"] for item in reply["output"]] == [item["content"] for item in plain["output"]]


def test_demands_on_the_answer(dialect: Responses) -> None:
    tools = [TOOL, TOOL | {"name": "sub"}]
    one = {"type": "function", "name": "sub"}
    some = {"type": "allowed_tools", "mode": "required", "tools": [one]}
    assert parsed(dialect, "hi", tools=tools).required_tools == []
    assert parsed(dialect, "hi", tools=tools, tool_choice="required").required_tools == ["add", "sub"]
    assert parsed(dialect, "hi", tools=tools, tool_choice=one).required_tools == ["sub"]
    assert parsed(dialect, "hi", tools=tools, tool_choice=some).required_tools == ["sub"]
    assert not parsed(dialect, "hi", tools=tools, parallel_tool_calls=False).parallel_tool_calls
    schema = {"type": "object", "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
    assert parsed(dialect, "hi", text=wanted).json_schema == schema
    assert parsed(dialect, "hi", text={"format": {"type": "json_object"}}).json_schema == {"type": "object"}
    asked = parsed(dialect, "hi", include=["message.output_text.logprobs"], top_logprobs=3)
    assert (asked.logprobs, asked.top_logprobs) == (True, 3)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        ("text.format", {"text": {"format": {"type": "json_object"}}}),
    ],
)
async def test_a_demand_that_the_engine_cannot_meet_is_refused_by_its_name_here(
    bench: Bench, param: str, fields: dict[str, Any]
) -> None:
    bench.use(LimitedSampler())
    response = await post(bench, tools=[TOOL], **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_names_that_the_server_does_not_accept_are_refused(byte_model: Path) -> None:
    gateway = create_gateway(
        claims=MemoryClaimBook({"key": OpenClaim("e", 1, 0)}),
        sampler=ScriptedSampler(lambda prompt: [72]),
        model_folder=byte_model,
        model_name="tiny",
        sampling=SamplingConfig(),
        accepted_names=["gpt-4o"],
    )
    app = FastAPI()
    app.include_router(gateway.router)
    transport, headers = httpx.ASGITransport(app), {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://s", headers=headers) as http:
        for name in ("gpt-4o", "policy", "tiny"):
            reply = await http.post("/v1/responses", json={"model": name, "input": "x"})
            assert reply.status_code == 200, reply.text
        refused = await http.post("/v1/responses", json={"model": "gpt-5", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'gpt-4o' (interchange_server.model_names)" in refused.json()["error"]["message"]
        shown = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in shown] == ["tiny", "policy", byte_model.name, "gpt-4o"]


async def test_an_error_midway_is_an_event(bench: Bench) -> None:
    def lose(prompt: list[int]) -> str:
        bench.claims.lose(CLAIM, "the lease ran out")
        return "late"

    bench.answer = lose
    *_, error, failed = events_of((await post(bench, stream=True)).text)
    assert (error["type"], error["code"], error["message"]) == ("error", "claim_lost", "the lease ran out")
    assert error["error"]["code"] == "claim_lost"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the lease ran out"}
    assert bench.calls == []
