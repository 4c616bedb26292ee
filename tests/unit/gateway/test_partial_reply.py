"""The text of a partial reply is always a prefix of the text of the whole reply."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tiny_tokenizer import MARKERS, SPECIAL


@pytest.fixture(scope="session")
def renderer(byte_model: Path) -> ChatRenderer:
    return ChatRenderer(byte_model)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
PIECES = [
    *MARKERS,
    *SPECIAL,
    *("hello", " ", "\n", "\n\n", "é", "日本", "🙂", "STOP", "ST", "OP", "a", "b", ".", "</thi", "nk>"),
    *("<think>\n", "</think>\n\n", "<tool_call>", CALL, "  text  ", "<|im_start|>assistant\n"),
]
STOPS = [[], ["STOP"], ["\n\n"], ["ab", "abc"], ["b\n<", " "], ["é"], ["</think>"], ["TOP", "STOP", "OP."]]
STOPS += [["STOP\n"], ["\nhello"], ["\n\nSTOP\n", "\n "], [" hello ", "\n"], ["b \n"]]


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[str | int], str]:
    """Pieces of text, or bytes that need not be UTF-8, as a model might sample them; and how it begins."""
    units = st.one_of(st.sampled_from(PIECES), st.integers(0, 255), st.text(max_size=5))
    start = draw(st.sampled_from(["", "<think>", " \n<think>\n", "hello"]))
    return draw(st.lists(units, max_size=25)), start


def encode(renderer: ChatRenderer, units: list[str | int]) -> list[int]:
    """Token ids of text, markers as tokens of their own; an integer is one of the 256 byte tokens."""
    tokenizer = renderer.tokenizer
    ids: list[int] = []
    for unit in units:
        if isinstance(unit, int):
            ids.append(unit)
        elif unit in MARKERS or unit in SPECIAL:
            ids += tokenizer.encode(unit)
        else:
            ids += tokenizer.encode(unit)
    return ids


def told(renderer: ChatRenderer, ids: list[int], options: ParseOptions, cuts: list[int]) -> tuple[str, str]:
    live = renderer.partial(options)
    reasoning, content = "", ""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, end in pairwise(places):
        new = live.feed(ids[start:end])
        reasoning, content = reasoning + new[0], content + new[1]
    return reasoning, content


@settings(max_examples=150, deadline=None)
@given(sample=samples(), stops=st.sampled_from(STOPS), cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_plain_text_is_returned_except_for_the_last_characters(
    renderer: ChatRenderer, sample: tuple[list[str | int], str], stops: list[str], cuts: list[int]
) -> None:
    ids = encode(renderer, [sample[1], *sample[0]])
    text = renderer.text(ids, stops)
    live = renderer.partial_text(stops)
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    said = "".join(live.feed(ids[start:end])[1] for start, end in pairwise(places))
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
    reasoning, content = reasoning.replace("<", ""), content.replace("<", "")
    head: list[str | int] = ["<think>", "\n" + reasoning + "\n", "</think>", "\n\n"] if thinks else []
    ids = encode(renderer, [*head, content])
    options = ParseOptions(True, [stop] if stop else [])
    message = renderer.parse(ids, options)
    live = told(renderer, ids, options, [])
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
    options = ParseOptions(True, [stop])
    ids = encode(renderer, ["<think>", text] if thinks else [text])
    message = renderer.parse(ids, options)
    assert (message.get("reasoning_content", "") if thinks else message["content"]) == content
    assert content.startswith("".join(told(renderer, ids, options, [])))


def test_half_a_character_waits_for_the_other_half(renderer: ChatRenderer) -> None:
    live = renderer.partial(ParseOptions(True))
    first, second = renderer.tokenizer.encode("é")
    assert live.feed([first]) == ("", "")
    assert live.feed([second]) == ("", "é")
    assert live.feed([first]) == ("", "")
    assert live.feed(renderer.tokenizer.encode("x")) == ("", "\N{REPLACEMENT CHARACTER}x")


def test_a_tool_call_is_not_text_unless_tools_are_off(renderer: ChatRenderer) -> None:
    ids = encode(renderer, ["so: ", "<tool_call>", '{"name": "add"}', "</tool_call>"])
    assert renderer.partial(ParseOptions(True)).feed(ids) == ("", "so:")
    assert renderer.partial(ParseOptions(False)).feed(ids) == (
        "",
        'so: <tool_call>{"name": "add"}</tool_call>',
    )
