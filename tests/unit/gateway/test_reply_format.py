"""How replies of chat families are read: reasoning, calls, and all the rest as text, whole or streamed."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_families import (
    FAMILIES,
    deepseek_call,
    glm_call,
    json_call,
    llama_call,
    mistral_call,
    tekken_call,
)
from tinkerscript.gateway.chat_messages import joined_parts
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.reply_format import CALL_FORMATS, ReplyFormat

FORMATS = {each.name: ReplyFormat(calls=each) for each in CALL_FORMATS}
HARMONY = ReplyFormat(harmony=True)
A, B = ("add", {"a": 1}), ("sub", {"b": "é"})
SUB = '{"b": "é"}'
ADD, LLAMA_ADD = json_call("add", '{"a":1}'), llama_call("add", '{"a": 1}')
TYPED: list[dict[str, Any]] = [
    {"function": {"name": "sub", "parameters": {"properties": {"b": {"type": "string"}}}}}
]

READ: list[tuple[str, str, list[Any], str]] = [
    # format, text, calls, content
    ("hermes", json_call("add", '{"a": 1}'), [A], ""),
    ("hermes", f"so {ADD}\n{json_call('sub', SUB)} ok", [A, B], "so\nok"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", {})], ""),
    ("hermes", "<tool_call>{broken}</tool_call>", [], "<tool_call>{broken}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', [], None),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [], None),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', [], None),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [], None),
    ("hermes", json_call("add", '{"a": "</tool_call>"}'), [("add", {"a": "</tool_call>"})], ""),
    ("hermes", "<tool_call>" + json_call("add", '{"a": 1}'), [A], "<tool_call>"),
    ("llama3", llama_call("add", '{"a": 1}'), [A], ""),
    ("llama3", f" {LLAMA_ADD}; {llama_call('sub', SUB)}\n", [A, B], ""),
    ("llama3", f"so\n<|python_tag|>{LLAMA_ADD}", [A], "so"),
    ("llama3", '{"name": "Bob"}', [], '{"name": "Bob"}'),
    ("llama3", f"{llama_call('add', '{}')} and so on", [], None),
    ("llama3", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    ("mistral", mistral_call("add", '{"a": 1}'), [A], ""),
    ("mistral", 'x[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', [A], "x"),
    (
        "mistral",
        '[TOOL_CALLS] [{"name":"add","arguments":{"a":1}}, {"name":"sub","arguments":{"b":"é"}}]',
        [A, B],
        "",
    ),
    ("mistral", tekken_call("add", '{"a": 1}') + tekken_call("sub", '{"b": "é"}'), [A, B], ""),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', [A], ""),
    ("mistral", '[TOOL_CALLS] [{"name": "add"', [], '[TOOL_CALLS] [{"name": "add"'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", [], "[TOOL_CALLS]add[ARGS]{"),
    ("deepseek", "so\n" + deepseek_call("add", '{"a": 1}'), [A], "so"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("add", {}), ("sub", {})],
        "",
    ),
    ("deepseek", deepseek_call("add", "{"), [], deepseek_call("add", "{")),
    ("glm", glm_call("add", '{"a": 1}'), [A], ""),
    ("glm", glm_call("sub", '{"b": "7"}'), [("sub", {"b": "7"})], ""),
    ("glm", glm_call("sub", '{"b": " é\\n"}'), [("sub", {"b": " é\n"})], ""),
    ("glm", "<tool_call>add</tool_call>", [("add", {})], ""),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>", [], "<tool_call>add\n<arg_key>a</arg_key>"),
]


@pytest.mark.parametrize(("name", "text", "calls", "content"), READ)
def test_calls_are_read_and_the_rest_is_content(
    name: str, text: str, calls: list[Any], content: str | None
) -> None:
    read = FORMATS[name].read(text, tool_calls=True, tools=TYPED)
    assert list(read.calls) == calls
    said = joined_parts(read.content).strip()
    assert said == (text if content is None else content)
    assert list(FORMATS[name].read(text, tool_calls=False).content) == [text]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes", []),
        (" \n<think>hm", "hm", "", []),
        ("yes <think>hm</think>", "", "yes <think>hm</think>", []),
        ("<think>" + json_call("add", '{"a": 1}') + "</think>no", json_call("add", '{"a": 1}'), "no", []),
        ("<think>hm " + json_call("add", '{"a": 1}'), "hm ", "", [A]),
    ],
)
def test_reasoning_is_what_comes_first(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    read = FORMATS["hermes"].read(text, tool_calls=True)
    assert (read.reasoning, "".join(read.content), list(read.calls)) == (reasoning, content, calls)
    prefilled = ReplyFormat(prefilled=True, calls=FORMATS["hermes"].calls)
    if text.startswith("<think>"):
        again = prefilled.read(text.removeprefix("<think>"), tool_calls=True)
        assert (again.reasoning, "".join(again.content), list(again.calls)) == (reasoning, content, calls)
        assert prefilled.read(text, tool_calls=True) == read


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>final<|message|>hi", "", "hi", []),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi",
            "hm",
            "hi",
            [],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary "
            'json<|message|>{"a": 1}',
            "hm",
            "",
            [A],
        ),
        ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', "", "", [A]),
        ("<|channel|>commentary<|message|>wait<|end|><|start|>assistant<|channel|>ana", "", None, []),
        ("<|channel|>commentary to=functions.add<|message|>{", "", None, []),
        ("just text", "", "just text", []),
        ("<|channel|>analysis<|message|>hm", "hm", "", []),
    ],
)
def test_messages_on_channels_are_read(
    text: str, reasoning: str, content: str | None, calls: list[Any]
) -> None:
    read = HARMONY.read(text, tool_calls=True)
    assert (read.reasoning, list(read.calls)) == (reasoning, calls)
    said = "".join(read.content)
    assert said == content if content is not None else said.endswith(text[-6:])


def test_a_call_without_an_opener_does_not_end_reasoning() -> None:
    text = LLAMA_ADD
    read = FORMATS["llama3"].read(f"<think>{text}", tool_calls=True)
    assert (read.reasoning, list(read.calls)) == (text, [])
    read = FORMATS["llama3"].read(f"<think>hm<|python_tag|>{text}", tool_calls=True)
    assert (read.reasoning, list(read.calls)) == ("hm", [A])


SEEDS = [
    *(
        "<think>",
        "</think>",
        "\n",
        " ",
        "hello",
        "é",
        "{",
        "}",
        '"name"',
        "STOP",
        "<tool_call>",
        "</tool_call>",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "add", "<|python_tag|>", "<tool", "_call>", "</thi", "nk>", ";"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "final", "analysis", "to=functions.add"),
    *(
        json_call("add", '{"a": 1}'),
        llama_call("add", "{}"),
        mistral_call("add", "{}"),
        glm_call("add", "{}"),
    ),
    *(tekken_call("add", "{}"), deepseek_call("add", "{}"), "<|im_end|>"),
]
STOPS = [[], [], ["STOP"], ["STOP\n"], ["\n"], [" hello"], ["</think>"], ["_call>\n"]]


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(FAMILIES["qwen2.5"].write(tmp_path_factory.mktemp("partial")))


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.one_of(st.sampled_from(SEEDS), st.text(max_size=3), st.integers(0, 255)), max_size=12),
    start=st.sampled_from(["", "<think>", " <think>\n", "{"]),
    name=st.sampled_from([*FORMATS, "none", "harmony"]),
    prefilled=st.booleans(),
    tool_calls=st.booleans(),
    stops=st.sampled_from(STOPS),
    cuts=st.lists(st.integers(0, 500), max_size=5),
)
def test_what_is_streamed_is_a_prefix_of_the_message(
    renderer: ChatRenderer,
    pieces: list[str | int],
    start: str,
    name: str,
    prefilled: bool,
    tool_calls: bool,
    stops: list[str],
    cuts: list[int],
) -> None:
    calls = FORMATS[name].calls if name in FORMATS else None
    renderer.reply_format = ReplyFormat(prefilled=prefilled, calls=calls, harmony=name == "harmony")
    tokenizer = renderer.tokenizer
    ids = [
        id_
        for piece in [start, *pieces]
        for id_ in ([piece] if isinstance(piece, int) else tokenizer.encode(piece))
    ]
    options = ParseOptions(tool_calls, stops)
    message = renderer.parse(ids, options)

    def told(places: list[int]) -> tuple[str, str]:
        live = renderer.partial(options)
        parts = [live.feed(ids[begin:end]) for begin, end in pairwise([0, *places, len(ids)])]
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    reasoning, content = told(sorted(cut % (len(ids) + 1) for cut in cuts))
    assert message.get("reasoning_content", "").startswith(reasoning)
    assert message["content"].startswith(content)
    assert told(list(range(len(ids)))) == (reasoning, content)
    # No text is lost: every character is somewhere in the message, unless it was cut or is a marker.
    if not stops and name != "harmony":
        said = json.dumps(message, ensure_ascii=False)
        text = renderer.text(ids, ())
        assert said.count("é") == text.count("é")
        assert said.count("hello") == text.count("hello")


def test_plain_text_is_streamed_at_once(renderer: ChatRenderer) -> None:
    renderer.reply_format = FORMATS["hermes"]
    live = renderer.partial(ParseOptions(True))
    assert live.feed(renderer.tokenizer.encode("<think>hm</think>\nso <b> is ")) == ("hm", "so <b> is")
    assert live.feed(renderer.tokenizer.encode("<tool")) == ("", "")
    assert live.feed(renderer.tokenizer.encode("box ")) == ("", " <toolbox")


@pytest.mark.parametrize("name", [*FORMATS, "harmony"])
def test_reading_takes_linear_time(name: str) -> None:
    """A model that repeats a marker for ever does not stop the server."""
    format_ = HARMONY if name == "harmony" else FORMATS[name]
    for unit in (
        *SEEDS,
        '<tool_call>["',
        "<tool_call>add<arg_key>a</arg_key>",
        "<arg_key>a</arg_key><arg_value>b</arg_value>",
    ):
        text = ("<tool_call>add" if unit.startswith("<arg_key>") else "") + unit * (60_000 // len(unit))
        began = time.process_time()
        format_.read(text, tool_calls=True)
        assert time.process_time() - began < 1, unit


def test_a_stop_token_that_is_not_written_is_no_stop(tmp_path: Path) -> None:
    """gpt-oss ends parts of a reply with the token that ends replies in a history."""
    renderer = ChatRenderer(FAMILIES["gpt_oss"].write(tmp_path))
    assert renderer.tokenizer.added_tokens["<|end|>"] not in renderer.stop_token_ids
