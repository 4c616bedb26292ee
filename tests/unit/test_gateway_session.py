"""Token buffers: what extends what, why a prompt is a new root, and the life after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway import session as causes
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.session import Session, Turn
from tinkerscript.rollouts.call import Call, full_prompts, pack_ids, pack_logprobs, unpack_ids
from tiny_tokenizer import write_model_folder

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


class Book:
    """A session together with the calls that were recorded from it."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self.session = Session(renderer)
        self.calls: list[Call] = []

    def ids(self, text: str, *, close: bool = True) -> list[int]:
        """`text` byte for byte (never merged), and the stop token."""
        pieces = [self.renderer.tokenizer.encode(char) for char in text]
        return [token for piece in pieces for token in piece] + (
            self.renderer.stop_token_ids[:1] if close else []
        )

    def ask(
        self,
        messages: list[dict[str, Any]],
        sampled: list[int],
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[Turn, dict[str, Any]]:
        turn = self.session.plan(messages, tools or [])
        return turn, self.answer(turn, sampled)

    def answer(self, turn: Turn, sampled: list[int]) -> dict[str, Any]:
        reply = self.renderer.parse(sampled, ParseOptions(tool_calls=bool(turn.tools)))
        call = Call(
            call_id=f"call{len(self.calls)}",
            parent_id=turn.parent.call_id if turn.parent else None,
            new_prompt=turn.new_prompt,
            sampled=pack_ids(sampled),
            logprobs=pack_logprobs([-0.5] * len(sampled)),
            stop_reason="stop",
            policy_version=0,
            break_cause=turn.break_cause,
            messages=msgspec.json.encode(turn.new_messages).decode(),
            reply=msgspec.json.encode(reply).decode(),
            tools="[]" if turn.parent else msgspec.json.encode(turn.tools).decode(),
        )
        self.calls.append(call)
        self.session.add(turn, call.call_id, call.sampled, reply)
        return reply

    def restart(self) -> None:
        self.session = Session.restore(self.renderer, self.calls)


@pytest.fixture
def book(byte_model: Path) -> Book:
    return Book(ChatRenderer(byte_model))


def test_a_turn_extends_the_sampled_ids_exactly(book: Book) -> None:
    messages = [user("hi")]
    first, reply = book.ask(messages, book.ids("hello"))
    messages += [reply, user("again")]
    second, _ = book.ask(messages, book.ids("ok"))
    assert second.parent is not None
    assert second.break_cause is None
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


def test_reasoning_may_be_sent_back_or_not_but_not_changed(book: Book) -> None:
    messages = [user("hi")]
    _, reply = book.ask(messages, book.ids("<think>\nhm\n</think>\n\nyes"))
    sampled = book.renderer.tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    _, thoughtful = book.ask([user("other")], sampled)
    assert thoughtful["reasoning_content"] == "hm"
    bare = {"role": "assistant", "content": thoughtful["content"]}
    for history, extends in ((thoughtful, True), (bare, True), (bare | {"reasoning_content": "no"}, False)):
        turn = book.session.plan([user("other"), history, user("more")], [])
        assert (turn.parent is not None) is extends
        assert turn.break_cause == (None if extends else causes.HISTORY_EDITED)
    assert reply["content"]


def test_every_break_has_its_cause(book: Book) -> None:
    messages = [user("one")]
    first, reply = book.ask(messages, book.ids("a"))
    assert first.break_cause is None
    cases = {
        causes.SAMPLED_AGAIN: ([user("one")], []),
        causes.NEW_CONVERSATION: ([user("two")], []),
        causes.HISTORY_EDITED: ([user("one"), {"role": "assistant", "content": "b"}, user("x")], []),
        causes.TOOLS_CHANGED: ([user("one"), reply, user("x")], [TOOL]),
        causes.NO_NEW_MESSAGES: ([user("one"), reply], []),
    }
    for cause, (asked, tools) in cases.items():
        turn = book.session.plan(asked, tools)
        assert turn.parent is None
        assert turn.break_cause == cause
        assert unpack_ids(turn.prompt).tolist() == book.renderer.render(asked, tools)
    few_shot = [user("q"), {"role": "assistant", "content": "a"}, user("one")]
    assert book.session.plan(few_shot, []).break_cause == causes.NEW_CONVERSATION


def test_reasoning_that_never_closed_breaks_and_says_so(book: Book) -> None:
    sampled = book.renderer.tokenizer.encode("<think>hm<|im_end|>")
    _, reply = book.ask([user("one")], sampled)
    turn = book.session.plan([user("one"), reply, user("x")], [])
    assert turn.parent is None
    assert turn.break_cause == causes.RENDERER_REFUSED


def test_equality_is_normalised(book: Book) -> None:
    sampled = book.renderer.tokenizer.encode(
        '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call><|im_end|>'
    )
    _, reply = book.ask([user("one")], sampled, [TOOL])
    (call,) = reply["tool_calls"]
    sent_back = {
        "role": "assistant",
        "content": " \n",
        "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}],
    }
    result = tool_result(call["id"], "3")
    turn = book.session.plan([user("one"), sent_back, result], [TOOL])
    assert turn.parent is not None
    other_id = {**sent_back, "tool_calls": [{**sent_back["tool_calls"][0], "id": "call_x"}]}
    assert book.session.plan([user("one"), other_id, result], [TOOL]).parent is None


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


def test_siblings_with_equal_text_are_extended_in_turn(book: Book) -> None:
    turn = book.session.plan([user("one")], [])
    reply = book.answer(turn, book.ids("hello"))
    book.answer(turn, book.renderer.tokenizer.encode("hello<|im_end|>"))
    follow_up = [user("one"), reply, user("x")]
    parents = [book.session.plan(follow_up, []).parent for _ in range(3)]
    assert [node.call_id for node in parents if node] == ["call0", "call1", "call1"]


def test_a_restored_session_goes_on_where_it_was(book: Book) -> None:
    messages = [{"role": "system", "content": "s"}, user("one")]
    for round_number in range(4):
        _, reply = book.ask(messages, book.ids(f"r{round_number}"), [TOOL])
        messages += [reply, user(f"u{round_number}")]
    before = book.session.plan(messages, [TOOL])
    book.restart()
    after = book.session.plan(messages, [TOOL])
    assert after.parent is not None
    assert after.prompt == before.prompt
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
