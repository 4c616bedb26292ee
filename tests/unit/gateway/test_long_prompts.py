"""Long prompts are rendered beside the event loop: nobody waits for them, and conversations stay right."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway_bench import CLAIM, Bench
from session_book import Book, user
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.conversation import tree
from tinkerscript.gateway.conversation.session import LONG_PROMPT
from tinkerscript.gateway.named_model import LONG_BODY
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.testing import MemoryClaimBook
from tiny_tokenizer import write_model_folder

LONG_TEXT = "word " * (LONG_PROMPT // 5 + 1)


class GatedRenderer:
    """Makes each rendering wait in its thread until `go` is set, if its messages are long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.main = threading.get_ident()
        for name in ("render", "extend"):
            monkeypatch.setattr(ChatRenderer, name, self._gated(getattr(ChatRenderer, name)))

    def _gated(self, original: Any) -> Any:
        def gated(renderer: ChatRenderer, *args: Any) -> Any:
            if any(LONG_TEXT in str(arg) for arg in args):
                assert threading.get_ident() != self.main
                self.waiting.release()
                assert self.go.wait(30)
            return original(renderer, *args)

        return gated

    async def until_waiting(self, number: int = 1) -> None:
        for _ in range(number):
            assert await asyncio.to_thread(self.waiting.acquire, timeout=30)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    claims = MemoryClaimBook({"key": CLAIM, "other": OpenClaim("other", 1, 0)})
    bench = Bench(write_model_folder(tmp_path / "model", max_context=10 * LONG_BODY), claims)
    yield bench
    await bench.client.aclose()


async def test_others_are_answered_while_a_long_prompt_is_rendered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = GatedRenderer(monkeypatch)
    long = asyncio.create_task(bench.ask(LONG_TEXT))
    await gated.until_waiting()
    other = await bench.client.post(
        "/v1/chat/completions",
        json={"model": "policy", "messages": [user("hi")]},
        headers={"Authorization": "Bearer other"},
    )
    assert other.status_code == 200
    assert not long.done()
    gated.go.set()
    assert (await long)["choices"][0]["message"]["content"] == "hello"


async def test_look_alikes_continue_one_call_each_though_both_are_long(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Book(ChatRenderer(byte_model))
    book.renderer.max_context = 10 * LONG_PROMPT
    turns = [book.session.plan([user("q")], []) for _ in range(2)]
    replies = [book.answer(turn, book.ids("same")) for turn in turns]
    gated = GatedRenderer(monkeypatch)
    asked = [[user("q"), reply, user(LONG_TEXT)] for reply in replies]
    planned = [asyncio.create_task(book.session.plan_async(messages, [])) for messages in asked]
    await gated.until_waiting(2)
    gated.go.set()
    found = [await each for each in planned]
    assert [turn.parent.call_id for turn in found if turn.parent] == ["call0", "call1"]
    for turn in found:
        book.session.release(turn)
        assert turn.parent is not None
        assert turn.parent.pending == 0


async def test_a_refused_long_prompt_gives_its_place_back(byte_model: Path) -> None:
    book = Book(ChatRenderer(byte_model))
    _, reply = book.ask([user("q")], book.ids("a"))
    with pytest.raises(Exception, match="maximum context length"):
        await book.session.plan_async([user("q"), reply, user(LONG_TEXT)], [])
    turn = book.session.plan([user("q"), reply, user("next")], [])
    assert turn.parent is not None
    assert turn.parent.call_id == "call0"
    assert turn.fork_reason not in (tree.SAMPLED_AGAIN, tree.NEW_CONVERSATION)


def test_a_renderer_that_does_not_see_the_ids_of_long_texts_writes_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = ChatRenderer(TINY_MODEL)
    assert not renderer.uses_template
    tool = {"type": "function", "function": {"name": "f", "description": LONG_TEXT, "parameters": {}}}
    first = [{"role": "system", "content": LONG_TEXT}, user(f"{LONG_TEXT}<|im_end|>\n\U0001f600")]
    after = [{"role": "tool", "tool_call_id": "1", "content": LONG_TEXT}, user("hi"), user(LONG_TEXT)]
    end = renderer.stop_token_ids[:1]

    def both() -> list[list[int] | None]:
        prompt = renderer.render(first, [tool])
        return [prompt, renderer.extend(prompt, end, after, [tool], list)]

    deferred = both()
    monkeypatch.setattr("tinkerscript.gateway.rendering.LONG_TEXT", 10**9)
    assert None not in deferred
    assert deferred == both()
