"""Agent mode: what agents send besides is left out and named. Tools in a namespace: rendered, and called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway_bench import Bench
from tinkerscript.gateway.dialects.agent_mode import AGENT_FIELDS, AGENT_PREFIX, without_agent_fields
from tinkerscript.rollouts.alignment import AlignmentReport, explain
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts

USER = [{"role": "user", "content": "hi"}]
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "open",
    "description": "Open.",
    "parameters": {"type": "object"},
}

CLAUDE_CODE: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 50,
    "messages": USER,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "tools": [{"name": "Wait", "input_schema": {"type": "object"}, "defer_loading": True}],
}
CODEX: dict[str, Any] = {
    "model": "policy",
    "input": USER,
    "reasoning": {"summary": "auto"},
    "client_metadata": {"thread_id": "1"},
    "tools": [FUNCTION, {"type": "web_search", "external_web_access": False}],
}
OPENCODE: dict[str, Any] = {"model": "side", "messages": USER, "reasoning_effort": "low"}

REQUESTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "/v1/messages": (
        CLAUDE_CODE,
        ["context_management", "output_config.effort", "thinking.display", "tools[].defer_loading"],
        ["Wait"],
    ),
    "/v1/responses": (CODEX, ["client_metadata", "reasoning", "tools[type=web_search]"], ["open"]),
    "/v1/chat/completions": (OPENCODE, ["reasoning_effort"], []),
}
"""What an agent sends, which fields are ignored, and which tools the model sees."""


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_agents_request_is_refused_by_the_strict_route_and_recorded_by_the_other(
    bench: Bench, path: str
) -> None:
    request, ignored, tools = REQUESTS[path]
    refused = await bench.client.post(path, json=request)
    assert (refused.status_code, bench.calls) == (400, [])
    answered = await bench.client.post(AGENT_PREFIX + path, json=request)
    assert answered.status_code == 200, answered.text
    (call,) = bench.calls
    assert (call.ignored, call.side) == (ignored, request["model"] == "side")
    assert [tool["function"]["name"] for tool in json.loads(call.tools)] == tools


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_field_that_is_in_no_table_is_refused_by_both(bench: Bench, path: str) -> None:
    request = REQUESTS[path][0] | {"wish": 1}
    refused = await bench.client.post(AGENT_PREFIX + path, json=request)
    assert (refused.status_code, "wish" in refused.text, bench.calls) == (400, True, [])


async def test_the_alignment_report_says_what_had_no_effect(bench: Bench) -> None:
    for path, (request, *_) in REQUESTS.items():
        await bench.client.post(AGENT_PREFIX + path, json=request)
    calls = bench.calls
    report = AlignmentReport()
    report.add_episode(EpisodeRollouts("e", 1.0, merge_calls(calls, episode_uuid="e"), tuple(calls)))
    assert report.whole.ignored["thinking.display"] == report.whole.side_calls == 1
    said = "\n".join(explain(AlignmentReport.from_json(report.as_json())))
    assert "1 of 3 calls were an agent's side calls" in said
    assert "reasoning_effort (1)" in said
    assert "tools_changed" in said or "new_conversation" in said


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"text"', b'{"tools": 3, "thinking": [], "messages": [1]}'])
async def test_a_body_of_another_shape_is_refused_as_by_the_strict_route(bench: Bench, body: bytes) -> None:
    for path in AGENT_FIELDS:
        refused = await bench.client.post(AGENT_PREFIX + path, content=body)
        assert refused.status_code == 400, refused.text


def test_a_field_is_left_out_wherever_it_is() -> None:
    given = [b'{"provider_specific_fields": null}', *[b'{"provider_specific_fields": {}}'] * 2]
    body = b'{"messages": [%s]}' % b", ".join(given)
    left = b'{"messages":[{},{},{}]}'
    path = "/v1/chat/completions"
    assert without_agent_fields(path, body) == (left, ["messages[].provider_specific_fields"])


CALL = '<tool_call>\n{"name": "web__open", "arguments": {"page": 1}}\n</tool_call>'


@pytest.mark.parametrize("namespace", ["web", "web__"])
async def test_a_namespaces_tool_is_rendered_and_its_call_continues(byte_model: Path, namespace: str) -> None:
    bench = Bench(byte_model)
    replies = iter([CALL, "Done."])
    bench.answer = lambda _: next(replies)
    tools = [{"type": "namespace", "name": namespace, "description": "The web.", "tools": [FUNCTION]}]
    asked = {"model": "policy", "input": USER, "tools": tools, "max_output_tokens": 200}
    first = await bench.client.post("/v1/responses", json=asked)
    (item,) = first.json()["output"]
    assert (item["namespace"], item["name"]) == (namespace, "open")
    assert json.loads(item["arguments"]) == {"page": 1}
    (tool,) = json.loads(bench.calls[0].tools)
    function = tool["function"]
    assert (function["name"], function["description"]) == ("web__open", "The web.\n\nOpen.")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "a page"}
    more = asked | {"input": [*USER, item, result]}
    assert (await bench.client.post("/v1/responses", json=more)).status_code == 200
    bench.check_one_sequence(turns=2)
    await bench.client.aclose()
