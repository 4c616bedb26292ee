"""How replies of chat families are read: reasoning, calls, and all the rest as text, whole or streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
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
from tinkerscript.gateway.partial_reply import PartialReply
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.reply_format import CALL_FORMATS, ReplyFormat

FORMATS = {each.name: ReplyFormat(calls=each) for each in CALL_FORMATS}
HARMONY = ReplyFormat(harmony=True)
A, B = ("add", {"a": 1}), ("sub", {"b": "é"})
SUB = '{"b": "é"}'
SUB_CALL = '{"name":"sub","arguments":{"b":"é"}}'
ADD, LLAMA_ADD = json_call("add", '{"a":1}'), llama_call("add", '{"a": 1}')
TYPED: list[dict[str, Any]] = [
    {"function": {"name": "sub", "parameters": {"properties": {"b": {"type": "string"}}}}}
]
DEEPSEEK_ADD = "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK_TWO = f"<｜tool▁calls▁begin｜>{DEEPSEEK_ADD}\n{DEEPSEEK_ADD}<｜tool▁calls▁end｜>"

READ: list[tuple[str, str, list[Any], str]] = [
    # format, text, calls, content; `test_chat_template.py` has one ordinary call in each format
    ("hermes", f"so {ADD}\n{json_call('sub', SUB)} ok", [A, B], "so\nok"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", {})], ""),
    ("hermes", "<tool_call>{broken}</tool_call>", [], "<tool_call>{broken}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', [], None),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [], None),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', [], None),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [], None),
    ("hermes", json_call("add", '{"a": "</tool_call>"}'), [("add", {"a": "</tool_call>"})], ""),
    ("hermes", "<tool_call>" + json_call("add", '{"a": 1}'), [A], "<tool_call>"),
    ("llama3", f" {LLAMA_ADD}; {llama_call('sub', SUB)}\n", [A, B], ""),
    ("llama3", f"so\n<|python_tag|>{LLAMA_ADD}", [A], "so"),
    ("llama3", '{"name": "Bob"}', [], '{"name": "Bob"}'),
    ("llama3", f"{llama_call('add', '{}')} and so on", [], None),
    ("llama3", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    ("mistral", 'x[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', [A], "x"),
    ("mistral", f'[TOOL_CALLS] [{{"name":"add","arguments":{{"a":1}}}}, {SUB_CALL}]', [A, B], ""),
    ("mistral", tekken_call("add", '{"a": 1}') + tekken_call("sub", '{"b": "é"}'), [A, B], ""),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', [A], ""),
    ("mistral", '[TOOL_CALLS] [{"name": "add"', [], '[TOOL_CALLS] [{"name": "add"'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", [], "[TOOL_CALLS]add[ARGS]{"),
    ("deepseek", "so\n" + deepseek_call("add", '{"a": 1}'), [A], "so"),
    ("deepseek", DEEPSEEK_TWO, [("add", {}), ("add", {})], ""),
    ("deepseek", deepseek_call("add", "{"), [], deepseek_call("add", "{")),
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


THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>final<|message|>hi", "", "hi", []),
        (THOUGHT + "<|channel|>final<|message|>hi", "hm", "hi", []),
        (THOUGHT + ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "hm", "", [A]),
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
    *("\n", " ", "hello", "é", "{", "}", '"name"', "STOP", "add", ";", "to=functions.add"),
    *("<think>", "</think>", "</thi", "nk>", "<tool_call>", "</tool_call>", "<tool", "_call>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|im_end|>"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "final", "analysis"),
    *(json_call("add", '{"a": 1}'), llama_call("add", "{}"), mistral_call("add", "{}")),
    *(glm_call("add", "{}"), tekken_call("add", "{}"), deepseek_call("add", "{}")),
]
STOPS = [[], [], ["STOP"], ["STOP\n"], ["\n"], [" hello"], ["</think>"], ["_call>\n"]]


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(FAMILIES["qwen2.5"].write(tmp_path_factory.mktemp("partial")))


def encode(renderer: ChatRenderer, pieces: list[str | int]) -> list[int]:
    """The ids of texts, and of bytes that need not be UTF-8."""
    encoded = renderer.tokenizer.encode
    return [id_ for piece in pieces for id_ in ([piece] if isinstance(piece, int) else encoded(piece))]


def told(live: PartialReply, ids: list[int], cuts: Iterable[int] = ()) -> tuple[str, str]:
    """The reasoning and the content of all parts of a reply that is cut at these places."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = [live.feed(ids[begin:end]) for begin, end in pairwise(places)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


PIECES = st.one_of(st.sampled_from(SEEDS), st.text(max_size=3), st.integers(0, 255))


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=12),
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
    ids = encode(renderer, [start, *pieces])
    options = ParseOptions(tool_calls, stops)
    message = renderer.parse(ids, options)
    reasoning, content = told(renderer.partial(options), ids, cuts)
    assert message.get("reasoning_content", "").startswith(reasoning)
    assert message["content"].startswith(content)
    assert told(renderer.partial(options), ids, range(len(ids))) == (reasoning, content)
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


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=25),
    stops=st.sampled_from([*STOPS, ["ab", "abc"], ["é"], ["b\n<", " "], ["TOP", "STOP", "OP."]]),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_a_completion_is_returned_except_for_the_last_characters(
    renderer: ChatRenderer, pieces: list[str | int], stops: list[str], cuts: list[int]
) -> None:
    ids = encode(renderer, pieces)
    text = renderer.text(ids, stops)
    _, said = told(renderer.partial_text(stops), ids, cuts)
    assert text.startswith(said)
    # Part of a character at the end, and what may start a stop string, can still change.
    assert len(text) - len(said) <= max((len(stop) for stop in stops), default=1)


@settings(max_examples=150, deadline=None)
@given(
    reasoning=st.text(max_size=60),
    content=st.text(max_size=60),
    thinks=st.booleans(),
    stop=st.sampled_from(["", "STOP", "\n\nUser:"]),
)
def test_an_ordinary_message_is_returned_except_for_the_last_characters(
    renderer: ChatRenderer, reasoning: str, content: str, thinks: bool, stop: str
) -> None:
    renderer.reply_format = FORMATS["hermes"]
    reasoning, content = reasoning.replace("<", ""), content.replace("<", "")
    ids = encode(renderer, [f"<think>\n{reasoning}\n</think>\n\n" if thinks else "", content])
    options = ParseOptions(True, [stop] if stop else [])
    message = renderer.parse(ids, options)
    live = told(renderer.partial(options), ids)
    if thinks:
        assert live[0] == message.get("reasoning_content", "")
    assert len(message["content"]) - len(live[1]) <= max(len(stop) - 1, 0)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("so\nObservation:\n", "Observation:\n", "so\n"),
        ("\nObservation:", "\nObservation:", ""),
        (" so STOP ", " STOP ", "so"),
        ("\n\nso\n\n", "\n\n", ""),
        ("so\n\n", "\n\n", "so"),
        ("so \n", "STOP\n", "so"),
    ],
)
def test_a_stop_string_with_white_space_around_it_is_cut(
    renderer: ChatRenderer, text: str, stop: str, content: str, thinks: bool
) -> None:
    """In content and in reasoning, in a whole message and in a streamed one."""
    renderer.reply_format = FORMATS["hermes"]
    options = ParseOptions(True, [stop])
    ids = encode(renderer, ["<think>" if thinks else "", text])
    message = renderer.parse(ids, options)
    assert (message.get("reasoning_content", "") if thinks else message["content"]) == content
    assert content.startswith("".join(told(renderer.partial(options), ids)))


@pytest.mark.parametrize("name", [*FORMATS, "harmony"])
def test_reading_takes_linear_time(name: str) -> None:
    """A model that repeats a marker for ever does not stop the server."""
    format_ = HARMONY if name == "harmony" else FORMATS[name]
    argument = "<arg_key>a</arg_key>"
    for unit in (*SEEDS, '<tool_call>["', f"<tool_call>add{argument}", f"{argument}<arg_value>b</arg_value>"):
        text = ("<tool_call>add" if unit.startswith("<arg_key>") else "") + unit * (60_000 // len(unit))
        began = time.process_time()
        format_.read(text, tool_calls=True)
        assert time.process_time() - began < 1, unit


def test_a_stop_token_that_is_not_written_is_no_stop(tmp_path: Path) -> None:
    """gpt-oss ends parts of a reply with the token that ends replies in a history."""
    renderer = ChatRenderer(FAMILIES["gpt_oss"].write(tmp_path))
    assert renderer.tokenizer.added_tokens["<|end|>"] not in renderer.stop_token_ids
