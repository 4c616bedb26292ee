"""What the model samples is data: it makes a wrong answer or a failed tool call, never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact, f1, includes, match
from inspect_ai.solver import generate
from inspect_ai.tool import Tool, bash, tool
from pydantic_core import to_json
from tinker_cookbook.renderers import Message, Renderer, ToolSpec, get_renderer

from bridge_groups import group_of
from bridge_parts import END, Says, add, call, encode
from inspect_tinker_bridge.conversion import ChatConverter, parse_arguments, to_dicts
from inspect_tinker_bridge.rendering import TokenBuffer, parse_action, to_model_output, to_renderer_message

FAMILIES = [
    "qwen3_instruct",
    "qwen3",
    "qwen3_vl_instruct",
    "qwen3_5",
    "qwen3_8_low_reasoning",
    "kimi_k2",
    "nemotron3",
    "role_colon",
]


DEEP = "[" * 3000 + "]" * 3000
DIGITS = "9" * 5000
NASTY = {
    "5,000 digits": call("add", '{"a": ' + DIGITS + ', "b": 1}'),
    "3,000 levels": call("add", '{"a": ' + DEEP + "}"),
    "surrogate in a name": call("\\ud83d", "{}"),
    "surrogate in a value": call("note", '{"text": "\\ud83d 2"}'),
    "surrogate submitted": call("submit", '{"answer": "\\ud83d 2"}'),
    "NUL in a command": call("bash", '{"command": "echo \\u0000"}'),
    "NUL submitted": call("submit", '{"answer": "\\u0000"}'),
    "NUL said": "\0 1",
    "not numbers": call("add", '{"a": NaN, "b": Infinity}'),
    "too large": call("add", '{"a": 1e999, "b": -1e999}'),
    "a list": call("add", "[1, 2]"),
    "null": call("add", "null"),
    "a name that is a number": "<tool_call>\n" + '{"name": 3, "arguments": {}}' + "\n</tool_call>",
    "no name": "<tool_call>\n{}\n</tool_call>",
    "no end": "<tool_call>\n{",
    "our own name": call("unparsed_tool_call", '{"raw_text": ["x"]}'),
    "two ends": "1" + END + "2",
    "digits": DIGITS,
    "an infinite number": "1e999",
    "nothing": "",
    "thoughts": "<think>" * 50,
    "half a character": "\ufffd",
}


@tool
def note() -> Tool:
    async def execute(text: str) -> str:
        """Note something.

        Args:
            text: What.
        """
        return text

    return execute


SAMPLE = Sample(input="What is 1?", target="1", id=1)


@pytest.mark.parametrize("env_type", ["task", "single_turn", "multi_turn"])
async def test_no_text_ends_a_group_of_rollouts(renderer: Renderer, env_type: Any) -> None:
    own = generate() if env_type == "multi_turn" else react(tools=[add(), note(), bash(timeout=9)])
    scorers = [match(numeric=True), includes(), f1(), exact()]
    sandbox = "local" if env_type == "multi_turn" else None
    task = Task(dataset=[SAMPLE], solver=own, scorer=scorers, sandbox=sandbox)
    policy = Says(renderer, *(text + END for text in NASTY.values()))
    group = await group_of(
        task, renderer, policy, env_type=env_type, max_turns=2, num_envs_per_group=len(NASTY)
    )
    assert len(group.get_total_rewards()) == len(NASTY)
    assert all(0 <= reward <= 1 for reward in group.get_total_rewards())


texts = st.text(st.sampled_from('a1\0\ud83d{["<>') | st.characters(codec=None), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments = st.one_of(
    values.map(json.dumps),
    texts,
    st.integers(1, 6000).map(lambda digits: '{"a": ' + "1" * digits + "}"),
    st.integers(1, 1500).map(lambda levels: '{"a": ' + "[" * levels + "]" * levels + "}"),
)
calls = st.builds(
    lambda name, raw: "<tool_call>\n" + f'{{"name": {json.dumps(name)}, "arguments": {raw}}}\n</tool_call>',
    texts | st.just("add"),
    arguments,
)
kimi_calls = st.builds(
    lambda name, raw: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{raw}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    texts,
    arguments,
)
xml_calls = st.builds(
    lambda name, raw: (
        f"<tool_call>\n<function={name}>\n<parameter=a>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    ),
    texts | st.just("add"),
    arguments,
)
thoughts = texts.map(lambda text: f"<think>{text}</think>")
TOOL = ToolSpec(name="add", description="", parameters={"type": "object", "properties": {}})
actions = st.lists(texts | thoughts | calls | kimi_calls | xml_calls, max_size=3).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_action_becomes_a_message_that_can_be_logged_and_rendered_again(
    renderer: Renderer, family: str
) -> None:
    own = get_renderer(family, renderer.tokenizer)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=actions, ends=st.integers(0, 2), offered=st.booleans(), stops=st.lists(texts, max_size=1))
    def check(text: str, ends: int, offered: bool, stops: list[str]) -> None:
        said = text.encode("utf-8", "replace").decode() + END * ends
        texts = [stop for stop in stops if stop]
        parsed = parse_action(own, encode(renderer, said), [TOOL] if offered else [], stop_texts=texts)
        output = to_model_output(parsed.message, prompt_tokens=1, sampled_tokens=1, truncated=False)
        assert json.loads(to_json(output))
        assert to_json(to_dicts([output.message]))
        reply = to_renderer_message(own, output.message)
        prompt = TokenBuffer(own).render([Message(role="user", content="?"), reply, reply, reply])
        assert prompt.pieces

    check()


@settings(max_examples=300, deadline=None)
@given(raw=arguments | texts, name=texts | st.just("add"))
def test_a_call_that_a_server_reports_has_usable_arguments_or_says_what_is_wrong(raw: str, name: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": name, "arguments": raw}}]}
    completion = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    (made,) = ChatConverter().output(completion).message.tool_calls or []
    assert json.loads(to_json(made))
    arguments, problem = parse_arguments(raw)
    assert (arguments == {}) or problem is None
    assert made.arguments == arguments


async def test_the_failed_call_is_told_to_the_model_and_the_episode_goes_on(renderer: Renderer) -> None:
    task = Task(dataset=[SAMPLE], solver=react(tools=[add()]), scorer=match())
    policy = Says(renderer, NASTY["5,000 digits"] + END, call("submit", '{"answer": "1"}') + END)
    group = await group_of(task, renderer, policy, env_type="task")
    assert group.get_total_rewards() == [1.0]
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert (metrics["format_valid"], metrics["correct"]) == (0.0, 1.0)
    second = renderer.tokenizer.decode(policy.prompts[1])
    assert "the reply could not be parsed: Exceeds the limit (4300 digits)" in str(second)
