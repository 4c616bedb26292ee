"""Token buffers: what extends what, why a prompt is a new root, and restarts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from session_book import TOOL, Book, user
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.conversation.session import Session
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.rollouts.call import full_prompts, pack_ids, unpack_ids
from tiny_tokenizer import write_model_folder


@pytest.fixture
def book(byte_model: Path) -> Book:
    return Book(ChatRenderer(byte_model))


def test_a_turn_extends_the_sampled_ids_exactly(book: Book) -> None:
    messages = [user("hi")]
    first, reply = book.ask(messages, book.ids("hello"))
    messages += [reply, user("again")]
    second, _ = book.ask(messages, book.ids("ok"))
    assert second.parent is not None
    assert second.fork_reason is None
    text = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    expected = unpack_ids(first.prompt).tolist() + book.ids("hello") + book.renderer.tokenizer.encode(text)
    assert unpack_ids(second.prompt).tolist() == expected
    # `hello` encodes to one token, so a re-rendered history would differ.
    assert len(book.renderer.tokenizer.encode("hello")) == 1
    assert full_prompts(book.calls)["call1"] == second.prompt


def test_a_truncated_turn_is_closed_by_prompt_ids(book: Book) -> None:
    messages = [user("hi")]
    first, reply = book.ask(messages, book.ids("hell", close=False))
    second, _ = book.ask([*messages, reply, user("go on")], book.ids("o"))
    assert second.prompt.startswith(first.prompt + pack_ids(book.ids("hell", close=False)))
    assert unpack_ids(second.new_prompt)[0] == book.renderer.stop_token_ids[0]


def test_calls_in_flight_together_are_extended_each_on_its_own(book: Book) -> None:
    questions = [[user(f"question {number}")] for number in range(3)]
    turns = [book.session.plan(messages, []) for messages in questions]
    replies = {n: book.answer(turns[n], book.ids(f"answer {n}")) for n in (2, 0, 1)}
    follow_ups = [
        book.session.plan([*messages, replies[n], user("x")], []) for n, messages in enumerate(questions)
    ]
    for turn, follow_up in zip(turns, follow_ups, strict=True):
        assert follow_up.prompt.startswith(turn.prompt)
    assert [turn.parent.call_id for turn in follow_ups if turn.parent] == ["call1", "call2", "call0"]


def test_a_restored_session_continues(book: Book) -> None:
    messages = [{"role": "system", "content": "s"}, user("one")]
    for round_number in range(4):
        _, reply = book.ask(messages, book.ids(f"r{round_number}"), [TOOL])
        messages += [reply, user(f"u{round_number}")]
    before = book.session.plan(messages, [TOOL])
    book.restart()
    after = book.session.plan(messages, [TOOL])
    assert after.parent is not None
    assert after.prompt == before.prompt
    assert after.tools == before.tools == [TOOL]
    assert after.parent.call_id == "call3"


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    renderer = ChatRenderer(write_model_folder(tmp_path, max_context=64))
    session = Session(renderer)
    with pytest.raises(GatewayError, match="maximum context length is 64 tokens") as refused:
        session.plan([user("x" * 64)], [])
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


def test_a_turn_costs_what_it_adds(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    extend = book.renderer.extend

    def spy(tail: list[int], sampled: list[int], *rest: Any) -> list[int] | None:
        given.append(len(tail) + len(sampled))
        return extend(tail, sampled, *rest)

    monkeypatch.setattr(book.renderer, "extend", spy)
    messages = [user("one")]
    for _ in range(20):
        _, reply = book.ask(messages, book.ids("hello"))
        messages += [reply, user("more")]
    assert len(set(given[1:])) == 1


def test_random_conversations_keep_every_prefix(book: Book) -> None:
    rng = random.Random(5)
    histories: list[list[dict[str, Any]]] = []
    for step in range(300):
        if not histories or rng.random() < 0.2:
            messages = [user(f"start {rng.randrange(5)}")]
        else:
            messages = [*rng.choice(histories), user(f"turn {rng.randrange(3)}")]
        sampled = [rng.randrange(256) for _ in range(rng.randrange(1, 6))] + book.renderer.stop_token_ids[:1]
        turn, reply = book.ask(messages, sampled)
        if "assistant" in [message["role"] for message in messages]:
            assert turn.parent is not None, step
        histories.append([*messages, reply])
        if rng.random() < 0.05:
            book.restart()
        histories = histories[-20:]
        assert full_prompts(book.calls)[book.calls[-1].call_id] == turn.prompt


def test_a_model_without_a_renderer_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="martian")
    with pytest.raises(ConfigError, match=r"'martian'.*_name_or_path"):
        ChatRenderer(folder)
    named = write_model_folder(tmp_path / "named", model_type="other", _name_or_path="Qwen/Qwen3-8B")
    assert ChatRenderer(named).render([user("hi")], [])


@pytest.mark.parametrize(
    ("sampled", "content", "names"),
    [
        ("plain", "plain", []),
        ('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "", ["add"]),
        ('see\n<tool_call>{"name": "add"}</tool_call> and more', "see\nand more", ["add"]),
        ("<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", []),
        ('<tool_call>{"name": "add", "arguments": 3}', '<tool_call>{"name": "add", "arguments": 3}', []),
        (
            '<tool_call>{"name": "a"}</tool_call><tool_call>{no</tool_call>'
            '<tool_call>{"name": "b"}</tool_call>',
            "<tool_call>{no</tool_call>",
            ["a", "b"],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {"x": "\\ud800", "n": 1%s}}</tool_call>' % ("0" * 30),
            "",
            ["a"],
        ),
    ],
)
def test_nothing_that_was_sampled_vanishes(book: Book, sampled: str, content: str, names: list[str]) -> None:
    ids = book.renderer.tokenizer.encode(sampled + "<|im_end|>")
    message = book.renderer.parse(ids, ParseOptions(tool_calls=True))
    assert message["content"] == content
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
    assert msgspec.json.encode(message)
    as_text = book.renderer.parse(ids, ParseOptions(tool_calls=False))
    assert "tool_calls" not in as_text
    assert "".join(as_text["content"].split()) == "".join(sampled.split())


def test_stop_strings_are_cut_from_the_text_alone(book: Book) -> None:
    message = book.renderer.parse(book.ids("one END two", close=False), ParseOptions(True, ["END"]))
    assert message["content"] == "one "
