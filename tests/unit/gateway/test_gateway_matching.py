"""Which call a request continues: ids, equality, and the reason for every fork."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from session_book import TOOL, Book, assistant, tool_result, user
from tinkerscript.gateway.chat_messages import canonical_json
from tinkerscript.gateway.conversation import tree
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import unpack_ids

Messages = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "s"}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>'


@pytest.fixture
def book(byte_model: Path) -> Book:
    return Book(ChatRenderer(byte_model))


def tool_turn(book: Book, text: str = CALL_TEXT, opening: str = "one") -> tuple[Messages, dict[str, Any]]:
    """A conversation whose first reply calls a tool, and the result of that."""
    messages = [SYSTEM, user(opening)]
    _, reply = book.ask(messages, book.marked(text), [TOOL])
    return [*messages, reply, tool_result(reply["tool_calls"][0]["id"], "3")], reply


def extends(turn: Turn, call_id: str, matched_by: str) -> bool:
    assert turn.fork_reason is None
    return turn.parent is not None and (turn.parent.call_id, turn.matched_by) == (call_id, matched_by)


def forks(book: Book, messages: Messages, tools: Messages | None = None) -> str | None:
    """The reason for the fork, whose prompt must be the request's messages, rendered whole."""
    turn = book.session.plan(messages, [TOOL] if tools is None else tools)
    assert (turn.parent, turn.matched_by) == (None, None)
    rendered = book.renderer.render(messages, [TOOL] if tools is None else tools)
    assert unpack_ids(turn.prompt).tolist() == rendered
    return turn.fork_reason


def test_tool_call_ids_name_a_reply_and_text_is_found_by_equality(book: Book) -> None:
    messages, _ = tool_turn(book)
    second, reply = book.ask(messages, book.ids("it is 3"), [TOOL])
    assert extends(second, "call0", "ids")
    third, _ = book.ask([*messages, reply, user("sure?")], book.ids("yes"), [TOOL])
    assert extends(third, "call1", "equality")
    assert [call.matched_by for call in book.calls] == [None, "ids", "equality"]


def test_a_message_id_names_a_reply(book: Book) -> None:
    """As the Responses and Messages dialects parse it."""
    turn = book.session.plan([user("one")], [])
    replies = [book.answer(turn, book.marked("same")) for _ in range(3)]
    for index, reply in enumerate(replies):
        follow_up = book.session.plan([user("one"), {**reply, "id": f"call{index}"}, user("x")], [])
        assert extends(follow_up, f"call{index}", "ids")


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ('{"a": 1, "b": [1, {"c": 2}]}', '{"b":[1.0,{"c":2e0}],"a":1}', True),
        ("{}", "", True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": null}', "{}", False),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567168}', False),
        ('{"a": 1e999}', '{"a": -1e999}', False),
        ("{broken", "{broken ", False),
        ("[" * 100_000, "[" * 100_000, True),
        ('{"a": "%s"}' % ("x" * 5000), '{ "a" : "%s" }' % ("x" * 5000), True),
    ],
)
def test_canonical_json(text: str, other: str, same: bool) -> None:
    assert (canonical_json(text) == canonical_json(other)) is same


def test_outer_white_space_of_a_reply_does_not_count(book: Book) -> None:
    _, reply = book.ask([user("one")], book.marked("\n two  words \n"))
    for text, same in (("two  words", True), (reply["content"] + " ", True), ("two words", False)):
        turn = book.session.plan([user("one"), assistant(text), user("x")], [])
        assert (turn.parent is not None) is same
    assert forks(book, [user("one "), assistant("two  words"), user("x")], []) == tree.NEW_CONVERSATION


def test_reasoning_may_be_left_out_but_not_changed(book: Book) -> None:
    _, reply = book.ask([user("one")], book.marked("<think>\nhm\n</think>\n\nyes"))
    assert reply["reasoning_content"] == "hm"
    for again in (reply, assistant("yes"), assistant("yes", reasoning_content="\nhm ")):
        assert extends(book.session.plan([user("one"), again, user("x")], []), "call0", "equality")
    other = assistant("yes", reasoning_content="no")
    assert forks(book, [user("one"), other, user("x")], []) == tree.REASONING_EDITED
    _, plain = book.ask([user("two")], book.ids("yes"))
    invented = assistant(plain["content"], reasoning_content="no")
    assert forks(book, [user("two"), invented, user("x")], []) == tree.REASONING_EDITED


def test_reasoning_of_messages_that_the_caller_wrote_counts_too(book: Book) -> None:
    written = assistant("b", reasoning_content="why")
    messages = [user("a"), written, user("c")]
    _, reply = book.ask(messages, book.ids("d"))
    turn = book.session.plan([user("a"), assistant("b"), user("c"), reply, user("e")], [])
    assert extends(turn, "call0", "equality")
    other = [user("a"), {**written, "reasoning_content": "because"}, user("c"), reply, user("e")]
    assert forks(book, other, []) == tree.REASONING_EDITED


def test_ids_of_the_callers_own_are_no_edit(book: Book) -> None:
    """A framework that renames tool calls: results are matched by position, and rendered with our ids."""
    both = CALL_TEXT + CALL_TEXT.replace('"b": 2', '"b": 3')
    messages, reply = tool_turn(book, both)
    calls = [{**call, "id": f"mine-{index}"} for index, call in enumerate(reply["tool_calls"])]
    renamed = assistant("", tool_calls=calls)
    results = [tool_result("mine-1", "4"), tool_result("mine-0", "3")]
    turn, second = book.ask([*messages[:2], renamed, *results], book.ids("ok"), [TOOL])
    assert extends(turn, "call0", "equality")
    own = [call["id"] for call in reply["tool_calls"]]
    assert [each["tool_call_id"] for each in json.loads(book.calls[1].messages)] == own[::-1]
    went_on = [*messages[:2], renamed, *results, second, user("x")]
    assert extends(book.session.plan(went_on, [TOOL]), "call1", "equality")
    swapped = [tool_result("mine-0", "4"), tool_result("mine-1", "3")]
    history = [*messages[:2], renamed, *swapped, second, user("x")]
    assert forks(book, history) == tree.TOOL_RESULT_EDITED


def test_an_id_never_makes_up_for_other_content(book: Book) -> None:
    """The id names call 0; the content is that of call 1, which the id excludes."""
    first, reply = tool_turn(book)
    _, other = tool_turn(book, CALL_TEXT.replace("2", "5"))
    mixed = assistant("", tool_calls=[{**other["tool_calls"][0], "id": reply["tool_calls"][0]["id"]}])
    assert forks(book, [*first[:2], mixed, first[3]]) == tree.HISTORY_EDITED


Edit = Callable[[Messages], Messages]
EDITS: dict[str, tuple[str, Edit]] = {
    "an earlier user message": (tree.HISTORY_EDITED, lambda m: [m[0], user("uno"), *m[2:]]),
    "the last reply's text": (tree.HISTORY_EDITED, lambda m: [*m[:4], assistant("so 4"), *m[5:]]),
    "the arguments of a call": (tree.HISTORY_EDITED, lambda m: _calling(m, arguments='{"b": 3}')),
    "the name of a tool": (tree.HISTORY_EDITED, lambda m: _calling(m, name="sub")),
    "a tool's result": (tree.TOOL_RESULT_EDITED, lambda m: _replaced(m, 3, content="[result cleared]")),
    "a tool's result by its outer white space": (
        tree.TOOL_RESULT_EDITED,
        lambda m: _replaced(m, 3, content="3\n"),
    ),
    "text beside a tool call": (tree.TEXT_DROPPED, lambda m: _replaced(m, 2, content="")),
    "a tool call beside text": (
        tree.HISTORY_EDITED,
        lambda m: [*m[:2], assistant(m[2]["content"]), *m[3:]],
    ),
    "the first turn": (tree.HISTORY_SHORTENED, lambda m: [m[0], *m[3:]]),
    "the first turns for a summary": (
        tree.HISTORY_SHORTENED,
        lambda m: [m[0], user("so far: 3"), *m[4:]],
    ),
    "the system message": (tree.SYSTEM_CHANGED, lambda m: _replaced(m, 0, content="other")),
    "no system message": (tree.SYSTEM_CHANGED, lambda m: m[1:]),
}


def _replaced(messages: Messages, place: int, **fields: Any) -> Messages:
    return [*messages[:place], messages[place] | fields, *messages[place + 1 :]]


def _calling(messages: Messages, **changes: str) -> Messages:
    (call,) = messages[2]["tool_calls"]
    return _replaced(messages, 2, tool_calls=[call | {"function": call["function"] | changes}])


@pytest.mark.parametrize("last", ["text", "tool call"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_history_forks_and_says_what_was_edited(book: Book, edit: str, last: str) -> None:
    """The history ends with a reply that has an id, or with one that has none."""
    messages, _ = tool_turn(book, f"let me see {CALL_TEXT}")
    _, reply = book.ask(messages, book.ids("so 3"), [TOOL])
    messages += [reply, user("and now?")]
    assert extends(book.session.plan(messages, [TOOL]), "call1", "equality")
    if last == "tool call":
        _, reply = book.ask(messages, book.marked(CALL_TEXT), [TOOL])
        messages += [reply, tool_result(reply["tool_calls"][0]["id"], "7")]
        assert extends(book.session.plan(messages, [TOOL]), "call2", "ids")
    cause, change = EDITS[edit]
    edited = change(messages)
    assert forks(book, edited) == cause
    turn, again = book.ask(edited, book.ids("fine"), [TOOL])
    assert turn.fork_reason == cause
    went_on = book.session.plan([*edited, again, user("x")], [TOOL])
    assert extends(went_on, book.calls[-1].call_id, "equality")
    assert book.session.plan(messages, [TOOL]).fork_reason is None


def test_every_other_fork_has_its_reason(book: Book) -> None:
    messages = [user("one")]
    _, reply = book.ask(messages, book.ids("a"), [])
    more = [*messages, reply, user("x")]
    assert forks(book, [user("one")], []) == tree.SAMPLED_AGAIN
    assert forks(book, [user("one")], [TOOL]) == tree.TOOLS_CHANGED
    assert forks(book, [user("two")], []) == tree.NEW_CONVERSATION
    assert forks(book, more, [TOOL]) == tree.TOOLS_CHANGED
    assert forks(book, [user("one"), reply], []) == tree.NO_NEW_MESSAGES
    assert forks(book, [user("q"), assistant("a"), user("one")], []) == tree.NEW_CONVERSATION
    few_shot = [user("few"), assistant("shots"), user("one")]
    book.ask(few_shot, book.ids("a"), [])
    assert forks(book, few_shot, []) == tree.SAMPLED_AGAIN
    assert forks(book, [*few_shot[:2], user("two")], []) == tree.HISTORY_EDITED


def test_a_chat_format_that_cannot_continue_forks(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    _, reply = book.ask([user("one")], book.ids("a"))
    monkeypatch.setattr(book.renderer, "extend", lambda *_: None)
    assert forks(book, [user("one"), reply, user("x")], []) == tree.RENDERER_REFUSED


@pytest.fixture
def follow_up(book: Book) -> Messages:
    """What continues either of two replies with equal text."""
    turn = book.session.plan([user("one")], [])
    reply = book.answer(turn, book.ids("hello"))
    book.answer(turn, book.marked("hello"))
    return [user("one"), reply, user("x")]


def test_siblings_with_equal_text_are_extended_one_each(book: Book, follow_up: Messages) -> None:
    turns = [book.session.plan(follow_up, []) for _ in range(3)]
    assert [turn.parent.call_id for turn in turns if turn.parent] == ["call0", "call1", "call1"]


def test_a_request_that_failed_leaves_its_sibling_free(book: Book, follow_up: Messages) -> None:
    book.session.release(book.session.plan(follow_up, []))
    assert extends(book.session.plan(follow_up, []), "call0", "equality")


def test_counting_a_prompt_changes_nothing(book: Book, follow_up: Messages) -> None:
    tokens = asyncio.run(book.session.prompt_tokens(follow_up, []))
    turn = book.session.plan(follow_up, [])
    assert extends(turn, "call0", "equality")
    assert tokens == len(turn.prompt) // 4


def test_siblings_are_distinguished_by_the_ids_of_earlier_turns(book: Book) -> None:
    """Two subagents with equal texts; only the ids of their first tool calls differ."""
    histories: list[Messages] = []
    for _ in range(2):
        messages, _ = tool_turn(book)
        _, reply = book.ask(messages, book.ids("done"), [TOOL])
        histories.append([*messages, reply, user("next")])
    for messages, call_id in reversed(list(zip(histories, ("call1", "call3"), strict=True))):
        assert extends(book.session.plan(messages, [TOOL]), call_id, "equality")


def test_ids_work_after_a_restart(book: Book) -> None:
    messages, _ = tool_turn(book)
    tool_turn(book)
    book.restart()
    assert extends(book.session.plan(messages, [TOOL]), "call0", "ids")
    conversation = book.session.messages_of("call0")
    assert conversation == [*messages[:2], {**messages[2], "id": "call0"}]
