"""Anthropic Messages over the ASGI application: blocks, parameters, refusals, events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway_bench import CLAIM, Bench
from sse_events import events_of
from tinkerscript.gateway.dialects import AnthropicMessages

TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
CALLS = "".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": "é"}}}}\n</tool_call>' for a in (1, 2.0)
)
THINKING = {"type": "enabled", "budget_tokens": 1024}
HI = [{"role": "user", "content": "hi"}]


async def post(bench: Bench, messages: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": "policy", "max_tokens": 300, "messages": messages or HI} | fields
    return await bench.client.post("/v1/messages", json=body)


async def ask(bench: Bench, messages: Any = None, **fields: Any) -> dict[str, Any]:
    """The message, streamed or whole."""
    response = await post(bench, messages, **fields)
    assert response.status_code == 200, response.text
    return assembled(events_of(response)) if fields.get("stream") else response.json()


def assembled(events: list[Any]) -> dict[str, Any]:
    """The message of a stream, put together as Anthropic's client does."""
    message = events[0]["message"]
    content = message["content"]
    for event in events:
        match event["type"], event.get("delta"):
            case "content_block_start", _:
                assert event["index"] == len(content)
                content.append(event["content_block"])
            case "content_block_delta", {"type": "input_json_delta", "partial_json": arguments}:
                content[event["index"]]["input"] = json.loads(arguments)
            case "content_block_delta", {"type": kind, **texts}:
                field = kind.removesuffix("_delta")
                content[event["index"]][field] += texts[field]
            case "message_delta", end:
                message |= end
                message["usage"] |= event["usage"]
            case kind, _:
                assert kind in ("message_start", "ping", "content_block_stop", "message_stop")
    assert events[-1]["type"] == "message_stop"
    return message


async def test_a_message_is_anthropics(bench: Bench) -> None:
    bench.answer = "<think>\nhm\n</think>\n\nhello"
    reply = await ask(bench, system="Be kind.", thinking=THINKING, metadata={"user_id": "u"})
    (call,) = bench.calls
    sampled = len(call.sampled_ids)
    assert reply == {
        "id": f"msg_{call.call_id}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": f"msg_{call.call_id}"},
            {"type": "text", "text": "hello"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(call.new_prompt_ids),
            "output_tokens": sampled,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens_details": {"thinking_tokens": sampled - len("\n\nhello") - 1},
        },
    }
    prompt = bench.tokenizer.decode(call.new_prompt_ids.tolist())
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), (THINKING, True)],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_thinking_is_shown_on_request_and_recorded_always(
    bench: Bench, thinking: Any, shown: bool, stream: bool
) -> None:
    bench.answer = "<think>\nhm\n</think>\n\nhello"
    reply = await ask(bench, thinking=thinking, stream=stream)
    assert [block["type"] for block in reply["content"]] == (["thinking"] if shown else []) + ["text"]
    assert json.loads(bench.calls[0].reply)["reasoning_content"] == "hm"
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_stop_reasons(bench: Bench, stream: bool) -> None:
    stops = ["never", "STOP", "OP"]
    bench.answer = "one STOP"
    reply = await ask(bench, stop_sequences=stops, stream=stream)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"] == [{"type": "text", "text": "one "}]
    bench.answer = "for ever"
    reply = await ask(bench, max_tokens=3, stream=stream)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)
    bench.answer = CALLS
    reply = await ask(bench, tools=[TOOL], stream=stream)
    assert reply["stop_reason"] == "tool_use"
    assert [block["input"] for block in reply["content"]] == [{"a": 1, "b": "é"}, {"a": 2.0, "b": "é"}]


def reordered(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as a program writes them that keeps them in an object."""
    return [
        block | {"input": dict(reversed(block["input"].items()))} if block["type"] == "tool_use" else block
        for block in content
    ]


SENT_BACK: dict[str, Callable[[list[Any]], list[list[Any]]]] = {
    "as it came": lambda content: [content],
    "without thinking": lambda content: [content[1:]],
    "arguments reordered": lambda content: [reordered(content)],
    "in two messages": lambda content: [content[:-1], content[-1:]],
    "with nulls and caching": lambda content: [
        [block | {"cache_control": {"type": "ephemeral"}, "caller": None} for block in content]
    ],
}
"""The contents of the assistant's messages that a program makes of a reply."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", SENT_BACK)
async def test_an_unedited_conversation_is_one_sequence(bench: Bench, way: str, stream: bool) -> None:
    """Two turns with thinking, text and two tool calls each, then text."""
    fields: dict[str, Any] = {"tools": [TOOL], "system": "Add.", "thinking": THINKING, "stream": stream}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(2):
        bench.answer = f"<think>\nhm \n</think>\n\nso {CALLS}"
        content = (await ask(bench, messages, **fields))["content"]
        assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
        first, second = ({"type": "tool_result", "tool_use_id": each["id"]} for each in content[2:])
        results = [
            first | {"content": "3"},
            second | {"content": [text("4")], "is_error": True},
            text("go "),
            text("on"),
        ]
        messages += [{"role": "assistant", "content": each} for each in SENT_BACK[way](content)]
        messages.append({"role": "user", "content": results})
    bench.answer = "done"
    reply = await ask(bench, messages, **fields)
    messages += [{"role": "assistant", "content": "done"}, {"role": "user", "content": [text("thanks")]}]
    assert reply["content"] == [text("done")]
    await ask(bench, messages, **fields)
    bench.check_one_sequence(turns=4)
    recorded = json.loads(bench.calls[1].messages)
    assert [(each["role"], each["content"], each.get("is_error")) for each in recorded] == [
        ("tool", "3", None),
        ("tool", "4", True),
        ("user", "go on", None),
    ]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def test_a_stream_tells_the_message_block_by_block(bench: Bench) -> None:
    bench.answer = f"<think>\nhm\n</think>\n\nso {CALLS}"
    events = events_of(await post(bench, tools=[TOOL], thinking=THINKING, stream=True, return_token_ids=True))
    kinds = [
        event["delta"]["type"] if "index" in event and "delta" in event else event["type"] for event in events
    ]
    start, stop = "content_block_start", "content_block_stop"
    assert kinds == [
        *("message_start", "ping"),
        *(start, "thinking_delta", "thinking_delta", "signature_delta", stop),
        *(start, "text_delta", "text_delta", stop),
        *(start, "input_json_delta", stop) * 2,
        *("message_delta", "message_stop"),
    ]
    opening, end = events[0]["message"], events[-2]
    (call,) = bench.calls
    assert (opening["id"], opening["content"], opening["stop_reason"]) == (f"msg_{call.call_id}", [], None)
    assert opening["usage"]["input_tokens"] == len(call.new_prompt_ids)
    assert opening["prompt_token_ids"] == call.new_prompt_ids.tolist()
    assert end["usage"]["output_tokens"] == len(call.sampled_ids)
    assert end["token_ids"] == call.sampled_ids.tolist()
    tools = [
        e["content_block"] for e in events if e["type"] == start and e["content_block"]["type"] == "tool_use"
    ]
    recorded = json.loads(call.reply)["tool_calls"]
    assert [(each["id"], each["input"]) for each in tools] == [(each["id"], {}) for each in recorded]


async def test_ids_on_request(bench: Bench) -> None:
    reply = await ask(bench, return_token_ids=True)
    (call,) = bench.calls
    assert reply["prompt_token_ids"] == call.new_prompt_ids.tolist()
    assert reply["token_ids"] == call.sampled_ids.tolist()


async def test_an_empty_answer_has_no_content(bench: Bench) -> None:
    bench.answer = ""
    for stream in (False, True):
        reply = await ask(bench, stream=stream)
        assert (reply["content"], reply["stop_reason"]) == ([], "end_turn")
    await ask(bench, [*HI, {"role": "assistant", "content": []}, {"role": "user", "content": "well?"}])
    assert bench.calls[2].parent_id in {call.call_id for call in bench.calls[:2]}


async def test_arguments_of_any_size_come_back_the_same(bench: Bench) -> None:
    arguments = '{"a": 123456789012345678901234567890, "b": 1e300, "c": "\\u00e9"}'
    bench.answer = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    content = (await ask(bench, tools=[TOOL]))["content"]
    assert content[0]["input"] == json.loads(arguments)
    result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "3"}
    answer = {"role": "assistant", "content": content}
    await ask(bench, [*HI, answer, {"role": "user", "content": [result]}], tools=[TOOL])
    bench.check_one_sequence(turns=2)


async def test_the_prompt_is_counted_without_a_call(bench: Bench) -> None:
    first = await ask(bench, tools=[TOOL])
    more = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "more"}]
    body = {"model": "policy", "messages": more, "tools": [TOOL]}
    count = await bench.client.post("/v1/messages/count_tokens", json=body)
    second = await ask(bench, more, tools=[TOOL])
    assert count.json() == {"input_tokens": second["usage"]["input_tokens"]}
    bench.check_one_sequence(turns=2)
    long = body | {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert (await bench.client.post("/v1/messages/count_tokens", json=long)).json()["input_tokens"] > 5000


async def test_errors_are_anthropics(bench: Bench) -> None:
    response = await post(bench, [{"role": "user", "content": "x" * 5000}], stream=True)
    body = response.json()
    assert (response.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert body["error"]["details"]["error_code"] == "context_length_exceeded"
    bench.claims.lose(CLAIM, "the lease ran out")
    response = await post(bench)
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
    assert response.json()["error"]["details"] == {"error_code": "claim_lost"}


async def test_a_thread_is_refused_so_that_the_tool_runner_continues_without_one(bench: Bench) -> None:
    response = await post(bench, thread={"type": "create"})
    details = response.json()["error"]["details"]
    assert response.status_code == 400
    assert details == {"error_code": "thread_unsupported_request", "param": "thread"}
    assert not bench.calls


async def test_both_ways_to_send_a_key(bench: Bench) -> None:
    for headers in ({"x-api-key": "key"}, {"Authorization": "Bearer key"}):
        bench.client.headers = httpx.Headers(headers)
        await ask(bench)
    for headers in ({"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}, {}):
        bench.client.headers = httpx.Headers(headers)
        response = await post(bench)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.usefixtures("lose_claim")
async def test_an_error_midway_is_an_event(bench: Bench) -> None:
    *_, error = events_of(await post(bench, stream=True))
    assert (error["type"], error["error"]["message"]) == ("error", "the lease ran out")
    assert bench.calls == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, "overloaded_error"), (504, "timeout_error"), (500, "api_error"), (429, "rate_limit_error")],
)
def test_an_engine_that_fails_is_an_ordinary_error(status: int, kind: str) -> None:
    assert AnthropicMessages.error_body(status, "the engine failed")["error"]["type"] == kind
