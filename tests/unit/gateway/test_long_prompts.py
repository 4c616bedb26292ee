"""Long prompts are rendered beside the event loop: nobody waits for them, and the conversations stay right.

Also what else keeps one request from slowing the others: it leaves no reference cycles behind.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asgi_caller import AsgiCaller
from gateway_bench import CLAIM, Bench
from session_book import Book, user
from tinkerscript.gateway import named_model
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.conversation import fork_reasons
from tinkerscript.gateway.conversation.session import LONG
from tinkerscript.gateway.idempotency import fingerprint_of
from tinkerscript.gateway.named_model import LONG_BODY, PLACE_BYTES, PLACES, NamedModel, Turns
from tinkerscript.gateway.recording import Recorder
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.testing import MemoryClaimBook

LONG_TEXT = "word " * (LONG // 5 + 1)


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
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    claims = MemoryClaimBook({"key": CLAIM, "other": OpenClaim("other", 1, 0)})
    bench = Bench(byte_model, claims)
    yield bench
    await bench.client.aclose()


async def test_others_are_answered_while_a_long_prompt_is_rendered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.gateway._renderer, "max_context", 10 * LONG)  # pyright: ignore[reportPrivateUsage]
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
    book.renderer.max_context = 10 * LONG
    turns = [book.session.plan([user("q")], []) for _ in range(2)]
    replies = [book.answer(turn, book.ids("same")) for turn in turns]
    gated = GatedRenderer(monkeypatch)
    asked = [[user("q"), reply, user(LONG_TEXT)] for reply in replies]
    planned = [asyncio.create_task(book.session.plan_unblocked(messages, [])) for messages in asked]
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
        await book.session.plan_unblocked([user("q"), reply, user(LONG_TEXT)], [])
    turn = book.session.plan([user("q"), reply, user("next")], [])
    assert turn.parent is not None
    assert turn.parent.call_id == "call0"
    assert turn.fork_reason not in (fork_reasons.SAMPLED_AGAIN, fork_reasons.NEW_CONVERSATION)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_no_reference_cycles(bench: Bench, stream: bool) -> None:
    body = {"model": "policy", "messages": [user("hi")], "stream": stream}

    async def ask() -> None:
        caller = AsgiCaller(bench.app, "/v1/chat/completions", body, {"authorization": "Bearer key"})
        await caller.run()
        assert caller.status == 200

    for _ in range(3):  # What is made once is made now.
        await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await ask()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(each).__name__ for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert len(left) < 20, left


@pytest.mark.parametrize(("length", "most"), [(10, PLACES), (4 * PLACE_BYTES, PLACES // 5)])
async def test_requests_that_arrive_together_leave_turns_to_others(
    bench: Bench, length: int, most: int
) -> None:
    """Each turn of the loop samples for some of them, and then records some; of longer ones, fewer."""
    # White space is read and parsed, and not recorded.
    body = {"model": "policy", "messages": [user("hi")], "user": " " * length}
    headers = {"authorization": "Bearer key"}
    callers = [AsgiCaller(bench.app, "/v1/chat/completions", body, headers) for _ in range(3 * PLACES)]
    all_of_them = asyncio.gather(*(caller.run() for caller in callers))
    sampled, recorded, calls = [0], [0], bench.claims.recorded[CLAIM]
    while not all_of_them.done():
        await asyncio.sleep(0)
        sampled.append(len(bench.sampler.requests))
        recorded.append(len(calls))
    await all_of_them
    assert sampled[-1] == recorded[-1] == len(callers)
    assert max(after - before for before, after in itertools.pairwise(sampled)) == most
    assert max(after - before for before, after in itertools.pairwise(recorded)) <= PLACES


async def test_the_requests_of_a_turn_take_each_step_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are parsed before one is rendered, and all are rendered before one is sampled."""
    steps = list[str]()

    def noting(owner: type[Any], name: str) -> None:
        work = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            steps.append(name)
            return work(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((NamedModel, "_with_history"), (ChatRenderer, "render"), (Recorder, "requests")):
        noting(owner, name)
    body = {"model": "policy", "messages": [user("hi")]}
    headers = {"authorization": "Bearer key"}
    callers = [AsgiCaller(bench.app, "/v1/chat/completions", body, headers) for _ in range(PLACES)]
    await asyncio.gather(*(caller.run() for caller in callers))
    assert [step for step, _ in itertools.groupby(steps)] == ["_with_history", "render", "requests"]


async def test_a_large_record_has_a_turn_to_itself() -> None:
    turns, order = Turns(at_once=4), list[tuple[int, str]]()
    now = 0

    async def write(name: str, size: int) -> None:
        await turns.next(size)
        order.append((now, name))

    sizes = {"a": 0, "b": 0, "large": 9 * 2**20, "c": 0}
    writers = [asyncio.create_task(write(*each)) for each in sizes.items()]
    while not all(each.done() for each in writers):
        await asyncio.sleep(0)
        now += 1
    assert [name for _, name in order] == list(sizes), "in order"
    at = {name: turn for turn, name in order}
    assert at["a"] == at["b"] < at["large"] < at["c"]


async def test_a_long_request_is_read_beside_the_event_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And requests with one key are one call though they are read at the same time."""
    readers = list[bool]()

    def noted(*args: Any) -> Any:
        readers.append(threading.current_thread() is threading.main_thread())
        return fingerprint_of(*args)

    monkeypatch.setattr(named_model, "fingerprint_of", noted)
    monkeypatch.setattr(bench.gateway._renderer, "max_context", 2 * LONG_BODY)  # pyright: ignore[reportPrivateUsage]
    await bench.ask("hi")
    body = {"model": "policy", "messages": [user("word " * (LONG_BODY // 5))]}
    headers = {"Idempotency-Key": "k"}
    posts = (bench.client.post("/v1/chat/completions", json=body, headers=headers) for _ in range(3))
    replies = await asyncio.gather(*posts)
    assert readers == [True, False, False, False]
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert len(bench.claims.recorded[CLAIM]) == 2
