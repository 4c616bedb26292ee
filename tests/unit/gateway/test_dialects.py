"""What every wire format does with a request: parameters, refusals by name, demands on the reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway_bench import Bench, LimitedSampler
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects import DIALECTS, REFUSAL_BODIES
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.tokenizer import LightTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
}
FUNCTION: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "required": ["a"]}


@pytest.fixture(scope="module")
def tokenizer(byte_model: Path) -> LightTokenizer:
    return LightTokenizer(byte_model)


def parsed(tokenizer: LightTokenizer, path: str, fields: dict[str, Any]) -> ModelCall:
    (dialect,) = (each(tokenizer) for each in DIALECTS if each.path == path)
    return dialect.parse(json.dumps({"model": "policy"} | BODIES[path] | fields).encode())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refusal_has_the_shape_of_the_dialects_errors(dialect: Any) -> None:
    prefix = next(prefix for prefix in REFUSAL_BODIES if dialect.path.startswith(prefix))
    assert REFUSAL_BODIES[prefix](413, "too long") == dialect.error_body(413, "too long")


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (COMPLETIONS, {"max_tokens": 7, "stop": ["x"]}),
        (RESPONSES, {"max_output_tokens": 7}),
        (MESSAGES, {"max_tokens": 7, "stop_sequences": ["x"]}),
    ],
)
async def test_parameters_reach_the_sampler(bench: Bench, path: str, own: dict[str, Any]) -> None:
    """Those of chat completions are in `test_gateway_chat.py`."""
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    for fields in (given | own, {}):
        response = await bench.client.post(path, json={"model": "policy"} | BODIES[path] | fields)
        assert response.status_code == 200, response.text
    request, default = bench.sampler.requests
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.7, 0.9, 5, 7)
    assert request.stop == (["x"] if len(own) == 2 else [])
    assert (default.temperature, default.top_p, default.top_k) == (0.5, 1.0, -1)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
TEXT = {"type": "text", "text": "x"}
PREFILL = {"role": "assistant", "content": "I"}
HIDDEN = {"type": "adaptive", "display": "omitted"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}
SUB = {"type": "function", "name": "sub"}
DEFERRED = FUNCTION | {"defer_loading": True}


@pytest.mark.parametrize(
    ("path", "code", "param", "fields"),
    [
        (CHAT, "unknown_parameter", "frobnicate", {"frobnicate": 1}),
        (CHAT, "invalid_value", "n", {"n": "2"}),
        (CHAT, "invalid_value", "stop_token_ids[0]", {"stop_token_ids": [-1]}),
        (CHAT, "invalid_value", "stream_options", {"stream_options": {}}),
        (CHAT, "invalid_value", "top_logprobs", {"top_logprobs": 2}),
        (CHAT, "invalid_value", "tool_choice", {"tool_choice": "required"}),
        (CHAT, "unsupported_parameter", "tool_choice", {"tool_choice": {"type": "function"}}),
        (CHAT, "unsupported_parameter", "frequency_penalty", {"frequency_penalty": 0.5}),
        (CHAT, "invalid_value", "stop", {"stop": [""]}),
        (CHAT, "invalid_value", "max_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
        (CHAT, "invalid_value", "messages[0].content", chat(role="user")),
        (CHAT, "invalid_value", "messages[0].tool_call_id", chat(role="tool", content="x")),
        (CHAT, "unknown_parameter", "messages[0].cache", chat(role="user", content="x", cache=1)),
        (CHAT, "missing_required_parameter", "messages[0].role", chat(content="x")),
        (COMPLETIONS, "invalid_value", "prompt", {"prompt": ""}),
        (COMPLETIONS, "invalid_value", "prompt", {"prompt": [1, "x"]}),
        (COMPLETIONS, "invalid_value", "prompt", {"prompt": [-1]}),
        (COMPLETIONS, "invalid_value", "prompt[1]", {"prompt": ["x", [1, 99999]]}),
        (COMPLETIONS, "limit_exceeded", "n", {"prompt": ["a", "b"], "n": 128}),
        (RESPONSES, "unsupported_parameter", "reasoning.effort", {"reasoning": {"effort": "high"}}),
        (RESPONSES, "invalid_value", "top_logprobs", {"top_logprobs": 3}),
        (RESPONSES, "unsupported_parameter", "tool_choice", {"tool_choice": {"type": "web_search"}}),
        (RESPONSES, "invalid_value", "tool_choice", {"tool_choice": SUB, "tools": [FUNCTION]}),
        (RESPONSES, "invalid_value", "text.format.schema", {"text": {"format": {"type": "json_schema"}}}),
        (RESPONSES, "unsupported_parameter", "include", {"include": ["web_search_call.results"]}),
        (RESPONSES, "invalid_value", "previous_response_id", {"previous_response_id": "chatcmpl-1"}),
        (RESPONSES, "unsupported_parameter", "tools[0].type", {"tools": [{"type": "web_search"}]}),
        (RESPONSES, "unsupported_parameter", "tools[0].defer_loading", {"tools": [DEFERRED]}),
        (RESPONSES, "unsupported_parameter", "input[0].type", item(type="item_reference", id="msg_1")),
        (RESPONSES, "unsupported_content", "input[0].type", item(type="web_search_call", id="ws_1")),
        (RESPONSES, "unsupported_content", "input[0].content[0]", {"input": [user({"type": "input_image"})]}),
        (RESPONSES, "unsupported_content", "input[0].output[0]", {"input": [OUTPUT]}),
        (MESSAGES, "invalid_value", "stop_sequences", {"stop_sequences": [""]}),
        (MESSAGES, "invalid_value", "thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
        (MESSAGES, "unsupported_parameter", "thinking.display", {"thinking": HIDDEN}),
        (MESSAGES, "invalid_value", "tool_choice.name", {"tool_choice": {"type": "tool"}, "tools": [TOOL]}),
        (MESSAGES, "unsupported_parameter", "tools[0].type", {"tools": [TOOL | {"type": "web_search_2025"}]}),
        (MESSAGES, "unsupported_content", "messages[0].content[1]", {"messages": [user(TEXT, IMAGE)]}),
        (MESSAGES, "unsupported_content", "messages[0].content[0].content[0]", {"messages": [user(RESULT)]}),
        (MESSAGES, "invalid_value", "messages[0].content[0].type", {"messages": [user({"text": "x"})]}),
        (
            MESSAGES,
            "unsupported_content",
            "messages[1].role",
            {"messages": [*HI, PREFILL]},
        ),
        (MESSAGES, "unsupported_content", "system[0]", {"system": [IMAGE]}),
    ],
)
def test_what_is_not_honored_is_refused_by_name(
    tokenizer: LightTokenizer, path: str, code: str, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(tokenizer, path, fields)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, code, param)


CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("path", "ignored", "plain"),
    [
        (CHAT, {"user": "u", "metadata": {"a": "b"}, "store": False, "modalities": ["text"]}, {}),
        (CHAT, {"frequency_penalty": 0, "stop": None, "response_format": {"type": "text"}}, {}),
        (RESPONSES, {"background": False, "conversation": None, "metadata": {"a": "b"}}, {}),
        (RESPONSES, {"prompt_cache_key": "k", "reasoning": {"effort": None}, "service_tier": "auto"}, {}),
        (RESPONSES, {"text": {"format": {"type": "text"}}, "tool_choice": "auto", "include": []}, {}),
        (MESSAGES, CACHED | {"metadata": {"user_id": "u"}, "speed": "standard", "stream": None}, {}),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "top_k": 0}, {}),
        (MESSAGES, {"system": [{"type": "text", "text": "a"} | CACHED]}, {"system": "a"}),
        (MESSAGES, {"tools": [TOOL | {"type": "custom", "defer_loading": False}]}, {"tools": [TOOL]}),
    ],
)
def test_fields_that_change_nothing_are_accepted(
    tokenizer: LightTokenizer, path: str, ignored: dict[str, Any], plain: dict[str, Any]
) -> None:
    with_them, without = (parsed(tokenizer, path, fields) for fields in (ignored, plain))
    for field in ModelCall.__struct_fields__:
        assert getattr(with_them, field) == getattr(without, field)


FORMAT = {"type": "json_schema", "schema": SCHEMA}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [SUB]}
ONE = {"type": "tool", "name": "sub", "disable_parallel_tool_use": True}
AT_MOST_ONE = {"type": "auto", "disable_parallel_tool_use": True}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (RESPONSES, {}, {"required_tools": [], "parallel_tool_calls": True, "json_schema": None}),
        (RESPONSES, {"tool_choice": "required"}, {"required_tools": ["add", "sub"]}),
        (RESPONSES, {"tool_choice": SUB}, {"required_tools": ["sub"]}),
        (RESPONSES, {"tool_choice": ALLOWED}, {"required_tools": ["sub"]}),
        (RESPONSES, {"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (RESPONSES, {"text": {"format": FORMAT | {"name": "s"}}}, {"json_schema": SCHEMA}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"json_schema": {"type": "object"}}),
        (RESPONSES, LOGPROBS, {"logprobs": True, "top_logprobs": 3}),
        (MESSAGES, {}, {"required_tools": [], "parallel_tool_calls": True, "json_schema": None}),
        (MESSAGES, {"tool_choice": {"type": "any"}}, {"required_tools": ["add", "sub"]}),
        (MESSAGES, {"tool_choice": ONE}, {"required_tools": ["sub"], "parallel_tool_calls": False}),
        (MESSAGES, {"output_config": {"format": FORMAT}}, {"json_schema": SCHEMA}),
    ],
)
def test_demands_on_the_reply(
    tokenizer: LightTokenizer, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Those of chat completions are in `tests/unit/engine/test_grammars.py`, with what they do."""
    tool = FUNCTION if path == RESPONSES else TOOL
    call = parsed(tokenizer, path, {"tools": [tool, tool | {"name": "sub"}]} | fields)
    assert {name: getattr(call, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        (RESPONSES, "text.format", {"text": {"format": {"type": "json_object"}}}),
        (RESPONSES, "tool_choice", {"tool_choice": "required", "tools": [FUNCTION]}),
        (MESSAGES, "tool_choice", {"tool_choice": ONE, "tools": [TOOL]}),
        (MESSAGES, "tool_choice.disable_parallel_tool_use", {"tool_choice": AT_MOST_ONE, "tools": [TOOL]}),
        (MESSAGES, "output_config.format", {"output_config": {"format": FORMAT}}),
    ],
)
async def test_a_demand_that_the_engine_cannot_meet_is_refused_by_its_name_here(
    bench: Bench, path: str, param: str, fields: dict[str, Any]
) -> None:
    bench.use(LimitedSampler())
    response = await bench.client.post(path, json={"model": "policy"} | BODIES[path] | fields)
    error = response.json()["error"]
    assert (response.status_code, error.get("details", error)["param"]) == (400, param)
