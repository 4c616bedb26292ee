"""Anthropic Messages over the ASGI application: blocks, parameters, refusals, events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_bench import CLAIM, Bench, LimitedSampler
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects import AnthropicMessages
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.tokenizer import LightTokenizer

TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
CALLS = "".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": "é"}}}}\n</tool_call>' for a in (1, 2.0)
)
THINKING = {"type": "enabled", "budget_tokens": 1024}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(byte_model)
    bench.client.headers = httpx.Headers({"x-api-key": "key", "anthropic-version": "2023-06-01"})
    yield bench
    await bench.client.aclose()


@pytest.fixture(scope="module")
def dialect(byte_model: Path) -> AnthropicMessages:
    return AnthropicMessages(LightTokenizer(byte_model))


async def post(bench: Bench, messages: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": "policy", "max_tokens": 300, "messages": messages or HI} | fields
    return await bench.client.post("/v1/messages", json=body)


async def ask(bench: Bench, messages: Any = None, **fields: Any) -> dict[str, Any]:
    """The message, streamed or whole."""
    response = await post(bench, messages, **fields)
    assert response.status_code == 200, response.text
    return assembled(events_of(response.text)) if fields.get("stream") else response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as Anthropic's client does."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                partial[event["index"]] = partial.get(event["index"], "") + event["delta"]["partial_json"]
            case "content_block_delta":
                field = fields[event["delta"]["type"]]
                message["content"][event["index"]][field] += event["delta"][field]
            case "content_block_stop":
                if event["index"] in partial:
                    message["content"][event["index"]]["input"] = json.loads(partial[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case _:
                assert event["type"] in ("ping", "message_stop")
    assert events[-1]["type"] == "message_stop"
    return message


def parsed(dialect: AnthropicMessages, **fields: Any) -> ModelCall:
    body = {"model": "policy", "max_tokens": 9, "messages": HI} | fields
    return dialect.parse(json.dumps(body).encode())


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


def without_thinking(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for block in content if block["type"] != "thinking"]


def reordered(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as a program writes them that keeps them in an object."""
    return [
        block | {"input": dict(reversed(block["input"].items()))} if block["type"] == "tool_use" else block
        for block in content
    ]


SENT_BACK = {
    "as it came": lambda content: [{"role": "assistant", "content": content}],
    "without thinking": lambda content: [{"role": "assistant", "content": without_thinking(content)}],
    "arguments reordered": lambda content: [{"role": "assistant", "content": reordered(content)}],
    "in two messages": lambda content: [
        {"role": "assistant", "content": content[:-1]},
        {"role": "assistant", "content": content[-1:]},
    ],
    "with nulls and caching": lambda content: [
        {
            "role": "assistant",
            "content": [
                block | {"cache_control": {"type": "ephemeral"}, "citations": None, "caller": None}
                for block in content
            ],
        }
    ],
}


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
        results = [
            {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "3"},
            {
                "type": "tool_result",
                "tool_use_id": content[3]["id"],
                "content": [text("4")],
                "is_error": True,
            },
        ]
        messages += [*SENT_BACK[way](content), {"role": "user", "content": results}]
    bench.answer = "done"
    reply = await ask(bench, messages, **fields)
    messages += [{"role": "assistant", "content": "done"}, {"role": "user", "content": [text("thanks")]}]
    assert reply["content"] == [text("done")]
    await ask(bench, messages, **fields)
    bench.check_one_sequence(turns=4)
    results = json.loads(bench.calls[1].messages)
    assert [message.get("is_error") for message in results] == [None, True]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_what_anthropics_client_sends_back(dialect: AnthropicMessages) -> None:
    """A request of anthropic 2.11, recorded; the ids of calls shortened."""
    call_id = "9396867934684134b0cefb83eea3d71a"
    body = f"""{{"max_tokens": 300, "messages": [{{"role": "user", "content": "add"}}, {{"role": "assistant",
    "content": [{{"signature": "msg_{call_id}", "thinking": "I need tools", "type": "thinking"}},
    {{"citations": null, "text": "Let me add.", "type": "text"}},
    {{"id": "call_1", "input": {{"a": 1, "b": "é"}}, "name": "add", "type": "tool_use"}},
    {{"id": "call_2", "input": {{"a": 2.0, "b": "é"}}, "name": "add", "type": "tool_use"}}]}},
    {{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": "call_1",
    "content": [{{"type": "text", "text": "0"}}], "is_error": false}}, {{"type": "tool_result",
    "tool_use_id": "call_2"}}, {{"type": "text", "text": "go "}}, {{"type": "text", "text": "on"}}]}}],
    "model": "policy",
    "system": [{{"type": "text", "text": "sys", "cache_control": {{"type": "ephemeral"}}}}],
    "thinking": {{"type": "enabled", "budget_tokens": 1024}}, "tools": [{{"name": "add", "description":
    "Adds.", "input_schema": {{"type": "object"}}}}], "stream": true}}"""
    call = dialect.parse(body.encode())
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert call.tools == [{"type": "function", "function": function}]
    arguments = ['{"a": 1, "b": "é"}', '{"a": 2.0, "b": "é"}']
    assert call.messages == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning_content": "I need tools",
            "id": call_id,
            "tool_calls": [
                {"id": f"call_{n + 1}", "type": "function", "function": {"name": "add", "arguments": given}}
                for n, given in enumerate(arguments)
            ],
        },
        {"role": "tool", "content": "0", "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "tool_call_id": "call_2"},
        {"role": "user", "content": "go on"},
    ]
    assert (call.stream, call.max_tokens) == (True, 300)


async def test_a_stream_tells_the_message_block_by_block(bench: Bench) -> None:
    bench.answer = f"<think>\nhm\n</think>\n\nso {CALLS}"
    events = events_of((await post(bench, tools=[TOOL], thinking=THINKING, stream=True)).text)
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
    opening = events[0]["message"]
    (call,) = bench.calls
    assert (opening["id"], opening["content"], opening["stop_reason"]) == (f"msg_{call.call_id}", [], None)
    assert opening["usage"]["input_tokens"] == len(call.new_prompt_ids)
    assert events[-2]["usage"]["output_tokens"] == len(call.sampled_ids)
    tools = [
        e["content_block"] for e in events if e["type"] == start and e["content_block"]["type"] == "tool_use"
    ]
    recorded = json.loads(call.reply)["tool_calls"]
    assert [(each["id"], each["input"]) for each in tools] == [(each["id"], {}) for each in recorded]


async def test_ids_on_request(bench: Bench) -> None:
    whole = await ask(bench, return_token_ids=True)
    events = events_of((await post(bench, return_token_ids=True, stream=True)).text)
    first, second = bench.calls
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (
        first.new_prompt_ids.tolist(),
        first.sampled_ids.tolist(),
    )
    assert events[0]["message"]["prompt_token_ids"] == second.new_prompt_ids.tolist()
    assert events[-2]["token_ids"] == second.sampled_ids.tolist()
    assert not {"token_ids", "prompt_token_ids"} & (await ask(bench)).keys()


async def test_an_empty_answer_has_no_content(bench: Bench) -> None:
    bench.answer = ""
    for stream in (False, True):
        reply = await ask(bench, stream=stream)
        assert (reply["content"], reply["stop_reason"]) == ([], "end_turn")
    more = [*HI, {"role": "assistant", "content": []}, {"role": "user", "content": "well?"}]
    await ask(bench, more)
    assert bench.calls[2].parent_id in {call.call_id for call in bench.calls[:2]}


async def test_parameters_reach_the_sampler(bench: Bench) -> None:
    await ask(bench, temperature=0.7, top_p=0.9, top_k=5, max_tokens=7, stop_sequences=["x"])
    await ask(bench, tool_choice={"type": "none"}, tools=[TOOL])
    request, default = bench.sampler.requests
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.7, 0.9, 5, 7)
    assert request.stop == ["x"]
    assert (default.temperature, default.top_p, default.top_k) == (0.5, 1.0, -1)


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
    refused = await bench.client.post("/v1/messages/count_tokens", json=body | {"max_tokens": 3})
    assert refused.json()["error"]["details"]["param"] == "max_tokens"
    long = body | {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert (await bench.client.post("/v1/messages/count_tokens", json=long)).json()["input_tokens"] > 5000


def image(kind: str = "image") -> dict[str, Any]:
    return {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def said(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}, *([] if role == "user" else HI)]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("container", {"container": "c"}),
        ("context_management", {"context_management": {"edits": []}}),
        ("inference_geo", {"inference_geo": "eu"}),
        ("mcp_servers", {"mcp_servers": [{"type": "url"}]}),
        ("output_config.effort", {"output_config": {"effort": "low"}}),
        ("service_tier", {"service_tier": "priority"}),
        ("speed", {"speed": "fast"}),
        ("seed", {"seed": 1}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": None}),
        ("messages", {"messages": []}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
        ("thinking.display", {"thinking": {"type": "adaptive", "display": "omitted"}}),
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice", {"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}, "tools": [TOOL]}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools[0].input_examples", {"tools": [TOOL | {"input_examples": [{}]}]}),
        ("tools[0].defer_loading", {"tools": [TOOL | {"defer_loading": True}]}),
        ("tools[0].input_schema", {"tools": [{"name": "add"}]}),
        ("messages[0].content[0]", {"messages": said(image())}),
        ("messages[0].content[1]", {"messages": said(text("see"), image("document"))}),
        (
            "messages[0].content[0]",
            {"messages": said({"type": "redacted_thinking", "data": "x"}, role="assistant")},
        ),
        (
            "messages[0].content[0]",
            {"messages": said({"type": "server_tool_use", "id": "s"}, role="assistant")},
        ),
        (
            "messages[0].content[0].content[0]",
            {"messages": said({"type": "tool_result", "tool_use_id": "t", "content": [image()]})},
        ),
        ("messages[0].content[0].citations", {"messages": said(text("x") | {"citations": [{}]})}),
        ("messages[0].content[0].mood", {"messages": said(text("x") | {"mood": "good"})}),
        ("messages[0].content[0].type", {"messages": said({"text": "x"})}),
        ("messages[0].content[0].tool_use_id", {"messages": said({"type": "tool_result", "content": "x"})}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[1].role", {"messages": [*HI, {"role": "assistant", "content": "I"}]}),
        ("system[0]", {"system": [image()]}),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    dialect: AnthropicMessages, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(dialect, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_fields_that_change_nothing_are_accepted(dialect: AnthropicMessages) -> None:
    with_them = parsed(
        dialect,
        cache_control={"type": "ephemeral"},
        metadata={"user_id": "u"},
        service_tier="auto",
        speed="standard",
        stop_sequences=None,
        stream=None,
        system=[text("a") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
        tools=[TOOL | {"type": "custom", "strict": True, "cache_control": None, "defer_loading": False}],
        top_k=0,
    )
    assert with_them == parsed(dialect, system="a", tools=[TOOL])


def test_demands_on_the_answer(dialect: AnthropicMessages) -> None:
    tools = [TOOL, TOOL | {"name": "sub"}]
    assert parsed(dialect, tools=tools).required_tools == []
    assert parsed(dialect, tools=tools, tool_choice={"type": "any"}).required_tools == ["add", "sub"]
    one = {"type": "tool", "name": "sub", "disable_parallel_tool_use": True}
    call = parsed(dialect, tools=tools, tool_choice=one)
    assert (call.required_tools, call.parallel_tool_calls) == (["sub"], False)
    schema = {"type": "object", "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    assert parsed(dialect, output_config=wanted).json_schema == schema


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        (
            "tool_choice.disable_parallel_tool_use",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ],
)
async def test_a_demand_that_the_engine_cannot_meet_is_refused_by_its_name_here(
    bench: Bench, param: str, fields: dict[str, Any]
) -> None:
    bench.use(LimitedSampler())
    bench.client.headers = httpx.Headers({"x-api-key": "key"})
    response = await post(bench, tools=[TOOL], **fields)
    assert (response.status_code, response.json()["error"]["details"]["param"]) == (400, param)


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


async def test_an_error_midway_is_an_event(bench: Bench) -> None:
    def lose(prompt: list[int]) -> str:
        bench.claims.lose(CLAIM, "the lease ran out")
        return "late"

    bench.answer = lose
    *_, error = events_of((await post(bench, stream=True)).text)
    assert (error["type"], error["error"]["message"]) == ("error", "the lease ran out")
    assert bench.calls == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, "overloaded_error"), (504, "timeout_error"), (500, "api_error"), (429, "rate_limit_error")],
)
def test_an_engine_that_fails_is_an_ordinary_error(status: int, kind: str) -> None:
    assert AnthropicMessages.error_body(status, "the engine failed")["error"]["type"] == kind
