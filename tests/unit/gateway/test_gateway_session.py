"""Token buffers: what extends what, why a prompt is a new root, and restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from session_book import Book, user
from tinkerscript.errors import ConfigError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import full_prompts, unpack_ids
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


def test_a_model_without_a_renderer_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="martian")
    with pytest.raises(ConfigError, match=r"'martian'.*_name_or_path"):
        ChatRenderer(folder)
    named = write_model_folder(tmp_path / "named", model_type="other", _name_or_path="Qwen/Qwen3-8B")
    assert ChatRenderer(named).render([user("hi")], [])
