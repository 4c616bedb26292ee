"""OpenAI Responses over the ASGI application: items, parameters, refusals, events."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import sse_events
from gateway_bench import Bench
from tinkerscript.gateway.dialects import Responses
from tinkerscript.gateway.dialects.dialect import ModelCall
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
    reply = events_of(response)[-1]["response"] if fields.get("stream") else response.json()
    Response.model_validate(reply)
    return reply


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = sse_events.events_of(response)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def parsed(dialect: Responses, items: Any, **fields: Any) -> ModelCall:
    return dialect.parse(json.dumps({"model": "policy", "input": items} | fields).encode())


async def test_a_response_is_openais(bench: Bench) -> None:
    bench.answer = "<think>\nhm\n</think>\n\nhello"
    given: dict[str, Any] = {
        "instructions": "Be kind.",
        "metadata": {"k": "v"},
        "temperature": 0.7,
        "max_output_tokens": 99,
    }
    reply = await ask(bench, **given)
    assert given.items() <= reply.items()
    (call,) = bench.calls
    assert reply["id"] == f"resp_{call.call_id}"
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "tiny")
    thought, said = reply["output"]
    assert thought["id"] == f"rs_{call.call_id}"
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (said["id"], said["role"], said["status"]) == (f"msg_{call.call_id}", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in said["content"]] == [("output_text", "hello")]
    usage, asked, sampled = reply["usage"], len(call.new_prompt_ids), len(call.sampled_ids)
    totals = (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])
    assert totals == (asked, sampled, asked + sampled)
    assert usage["output_tokens_details"] == {"reasoning_tokens": sampled - len("\n\nhello") - 1}
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
    *_, last = events_of(await post(bench, max_output_tokens=5, stream=True))
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


Items = list[dict[str, Any]]


def interleaved(output: Items, results: Items) -> Items:
    """Every call's output right after the call."""
    calls, others = output[2:], output[:2]
    return others + [item for pair in zip(calls, results, strict=True) for item in pair]


def without(output: Items, *fields: str) -> Items:
    return [{name: value for name, value in item.items() if name not in fields} for item in output]


NULLS = {"async_": None, "namespace": None, "phase": None}
SENT_BACK: dict[str, Callable[[Items, Items], Items]] = {
    "as it came": lambda output, results: output + results,
    "without reasoning": lambda output, results: output[1:] + results,
    "interleaved": interleaved,
    "without ids": lambda output, results: without(output, "id", "status") + results,
    "with nulls": lambda output, results: [item | NULLS for item in output] + results,
    "reasoning encrypted": lambda output, results: without(output[:1], "content") + output[1:] + results,
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
    said = {"type": "message", "role": "assistant"}
    output = [said | {"id": f"msg_{each * 32}", "content": [part("output_text", each)]} for each in "ab"]
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


def part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


async def test_a_stream_tells_the_response_step_by_step(bench: Bench) -> None:
    bench.answer = f"<think>\nhm\n</think>\n\nso {CALLS}"
    events = events_of(await post(bench, tools=[TOOL], max_output_tokens=300, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    added, done = "output_item.added", "output_item.done"
    part_added, part_done = "content_part.added", "content_part.done"
    assert kinds == [
        *("created", "in_progress"),
        *(added, part_added, *["reasoning_text.delta"] * 2, "reasoning_text.done", part_done, done),
        *(added, part_added, *["output_text.delta"] * 2, "output_text.done", part_done, done),
        *(added, "function_call_arguments.delta", "function_call_arguments.done", done) * 2,
        "completed",
    ]
    opening, whole = events[0]["response"], events[-1]["response"]
    assert (opening["status"], opening["output"], opening["usage"]) == ("in_progress", [], None)

    def told(kind: str, field: str) -> list[Any]:
        return [event[field] for event in events if event["type"] == f"response.{kind}"]

    assert told(done, "item") == whole["output"]
    assert told(added, "output_index") == [0, 1, 2, 3]
    assert "".join(told("output_text.delta", "delta")) == "so"
    assert "".join(told("reasoning_text.delta", "delta")) == "hm"
    assert set(told("output_text.delta", "item_id")) == {whole["output"][1]["id"]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_ids_and_logprobs_on_request(bench: Bench, stream: bool) -> None:
    bench.answer = "é!"
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "return_token_ids": True}
    response = await post(bench, stream=stream, **fields)
    (call,) = bench.calls
    reply = events_of(response)[-1]["response"] if stream else response.json()
    assert reply["token_ids"] == call.sampled_ids.tolist()
    assert reply["prompt_token_ids"] == call.new_prompt_ids.tolist()
    entries = reply["output"][0]["content"][0]["logprobs"]
    assert [entry["token_id"] for entry in entries] == call.sampled_ids.tolist()
    assert {entry["logprob"] for entry in entries} == {-0.5}
    if stream:
        deltas = [e for e in events_of(response) if e["type"] == "response.output_text.delta"]
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


async def test_the_prompt_is_counted_without_a_call(bench: Bench) -> None:
    first = await ask(bench, tools=[TOOL])
    items = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "more"}]
    counts: list[Any] = []
    for body in ({"input": items}, {"input": "more", "previous_response_id": first["id"]}):
        body |= {"model": "policy", "tools": [TOOL]}
        counts.append((await bench.client.post("/v1/responses/input_tokens", json=body)).json())
    second = await ask(bench, items, tools=[TOOL])
    tokens = second["usage"]["input_tokens"]
    assert counts == [{"object": "response.input_tokens", "input_tokens": tokens}] * 2
    bench.check_one_sequence(turns=2)


@pytest.mark.usefixtures("lose_claim")
async def test_an_error_midway_is_an_event(bench: Bench) -> None:
    *_, error, failed = events_of(await post(bench, stream=True))
    assert (error["type"], error["code"], error["message"]) == ("error", "claim_lost", "the lease ran out")
    assert error["error"]["code"] == "claim_lost"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the lease ran out"}
    assert bench.calls == []
