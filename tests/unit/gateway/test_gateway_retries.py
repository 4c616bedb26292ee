"""Repeated requests: when two are one call, and when both are sampled."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asgi_caller import AsgiCaller
from gateway_bench import CLAIM, Bench
from interchange_helpers import until
from tinkerscript.errors import GatewayError
from tinkerscript.gateway import idempotency
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.idempotency import IdempotencyCache, fingerprint_of
from tinkerscript.rollouts.call import Call
from tinkerscript.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.testing import MemoryClaimBook

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


class GatedSampler(Sampler):
    """Passes each request on once `go` is set, and counts them."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner
        self.go = asyncio.Event()
        self.started = self.cancelled = 0
        self.failures: list[Exception] = []
        """Raised by the next requests, in turn."""

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failures:
            raise self.failures.pop(0)
        return await self._inner.sample(request, progress)


class WatchedBook(MemoryClaimBook):
    """Calls `on_record` whenever a request's calls have been recorded, before the gateway hears of it."""

    on_record: Callable[[], None] | None = None
    go: asyncio.Event | None = None
    """Recording waits for it."""

    recording = 0

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        self.recording += 1
        if self.go:
            await self.go.wait()
        await super().record(claim, calls)
        if self.on_record:
            self.on_record()
        await asyncio.sleep(0)


@pytest.fixture
def book() -> WatchedBook:
    return WatchedBook({"key": CLAIM, "other": OpenClaim("other", 1, 0)})


@pytest.fixture
async def bench(byte_model: Path, book: WatchedBook) -> AsyncIterator[Bench]:
    bench = Bench(byte_model, book)
    answers = iter(range(10_000))
    bench.answer = lambda _: f"answer {next(answers)}"
    yield bench
    await bench.client.aclose()


def caller(bench: Bench, body: Any = BODY, path: str = CHAT, key: str = "key", **headers: str) -> AsgiCaller:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return AsgiCaller(bench.app, path, body, {"authorization": f"Bearer {key}"} | named)


async def released(gate: GatedSampler, *callers: AsgiCaller, started: int = 1) -> None:
    """Run the callers until so many samples have begun, and let those go."""
    running = [asyncio.create_task(each.run()) for each in callers]
    await until(lambda: gate.started == started)
    gate.go.set()
    await asyncio.gather(*running)


@pytest.fixture
def gate(bench: Bench) -> GatedSampler:
    made = GatedSampler(bench.sampler)
    bench.use(made)
    return made


async def undelivered(bench: Bench, body: Any = BODY, **headers: str) -> None:
    """A request whose client disconnects after the reply was recorded and before it was sent."""
    leaver = caller(bench, body, **headers)
    assert isinstance(bench.claims, WatchedBook)
    bench.claims.on_record = leaver.hang_up
    await leaver.run()
    bench.claims.on_record = None
    assert leaver.status is None or body["stream"]
    assert b"[DONE]" not in leaver.text


async def test_equal_requests_are_both_sampled_and_say_why_they_do_not_extend_each_other(
    bench: Bench, gate: GatedSampler
) -> None:
    other = BODY | {"messages": [{"role": "user", "content": "something else"}]}
    callers = [caller(bench), caller(bench), caller(bench, x_stainless_retry_count="0"), caller(bench, other)]
    await released(gate, *callers, started=4)
    late = await caller(bench, x_stainless_retry_count="1").run()
    texts = {each.json()["choices"][0]["message"]["content"] for each in [*callers, late]}
    assert len(texts) == 5
    reasons = Counter(call.fork_reason for call in bench.calls)
    assert reasons == {None: 1, "sampled_again": 3, "new_conversation": 1}


async def test_one_key_is_one_call_while_it_is_in_flight(bench: Bench, gate: GatedSampler) -> None:
    callers = [caller(bench, idempotency_key="k") for _ in range(3)]
    await released(gate, *callers)
    assert gate.started == len(bench.calls) == 1
    assert {each.status for each in callers} == {200}
    assert callers[0].text == callers[1].text == callers[2].text


async def test_one_key_is_one_call_after_it_is_over(bench: Bench) -> None:
    first = await caller(bench, idempotency_key="k").run()
    again = await caller(bench, idempotency_key="k").run()
    other = await caller(bench, idempotency_key="k2").run()
    others = await caller(bench, key="other", idempotency_key="k").run()
    assert first.text == again.text
    assert len({first.text, other.text, others.text}) == 3, "a key is of one claim"
    assert [call.idempotency_key for call in bench.calls] == ["k", "k2"]


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"logprobs": True, "return_token_ids": True}, {"stream": True}], ids=str
)
async def test_one_key_is_one_call_after_a_restart(
    bench: Bench, byte_model: Path, fields: dict[str, Any]
) -> None:
    """Also for the second turn, and a reply that calls a tool."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    bench.answer = '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    first = (await bench.ask(tools=tools, max_tokens=200))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    messages = [*BODY["messages"], first, result]
    body = BODY | {"messages": messages, "tools": tools, "max_tokens": 200} | fields
    before = await caller(bench, body, idempotency_key="k").run()
    restarted = Bench(byte_model, bench.claims)
    after = await caller(restarted, body, idempotency_key="k").run()
    assert (after.status, len(bench.calls)) == (200, 1 + fields.get("n", 1))
    told = _told if "stream" in fields else bytes
    assert told(after.text) == told(before.text)
    assert restarted.sampler.requests == []
    await restarted.client.aclose()


def _told(stream: bytes) -> dict[str, Any]:
    """The whole content of a stream, however it is split."""
    events = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "header": [events[-1][name] for name in ("id", "created", "system_fingerprint")],
        "reasoning": "".join(choice["delta"].get("reasoning_content", "") for choice in choices),
        "tools": [call for choice in choices for call in choice["delta"].get("tool_calls", [])],
        "end": choices[-1]["finish_reason"],
    }


async def test_what_was_recorded_in_part_is_sampled_again(bench: Bench, byte_model: Path) -> None:
    """A server that stopped between two choices of a request."""
    body = BODY | {"n": 3}
    await caller(bench, body, idempotency_key="k").run()
    del bench.calls[2:]
    restarted = Bench(byte_model, bench.claims)
    after = await caller(restarted, body, idempotency_key="k").run()
    assert len(after.json()["choices"]) == 3
    assert [call.fork_reason for call in bench.calls[2:]] == ["sampled_again"] * 3
    again = await caller(restarted, body, idempotency_key="k").run()
    assert again.text == after.text
    await restarted.client.aclose()


async def test_one_key_with_another_body_is_refused(bench: Bench, gate: GatedSampler) -> None:
    first = caller(bench, idempotency_key="k")
    running = asyncio.create_task(first.run())
    await until(lambda: gate.started == 1)
    other = BODY | {"temperature": 0.7}
    refusals = [await caller(bench, other, idempotency_key="k").run()]
    gate.go.set()
    await running
    refusals.append(await caller(bench, other, idempotency_key="k").run())
    for refusal in refusals:
        assert refusal.status == 422
        assert refusal.json()["error"]["code"] == "idempotency_key_reused"
        assert "'k'" in refusal.json()["error"]["message"]
    messages = {"model": "policy", "max_tokens": 5, "messages": BODY["messages"]}
    anthropic = await caller(bench, messages, "/v1/messages", idempotency_key="k").run()
    assert (anthropic.status, anthropic.json()["type"]) == (422, "error")
    long = await caller(bench, idempotency_key="k" * 256).run()
    assert (long.status, long.json()["error"]["code"]) == (400, "invalid_idempotency_key")
    assert len(bench.calls) == 1


async def test_a_waiting_request_takes_the_place_of_one_that_failed(bench: Bench, gate: GatedSampler) -> None:
    gate.failures = [GatewayError(503, "engine_away", "away")]
    callers = [caller(bench, idempotency_key="k") for _ in range(3)]
    await released(gate, *callers)
    assert [each.status for each in callers] == [503, 200, 200]
    assert callers[1].text == callers[2].text
    assert (gate.started, len(bench.calls)) == (2, 1)


async def test_a_waiting_request_takes_the_place_of_one_whose_client_left(
    bench: Bench, gate: GatedSampler
) -> None:
    first, second, third = (caller(bench, idempotency_key="k") for _ in range(3))
    running = [asyncio.create_task(each.run()) for each in (first, second, third)]
    await until(lambda: gate.started == 1)
    third.hang_up()
    first.hang_up()
    await until(lambda: gate.started == 2)
    gate.go.set()
    await asyncio.gather(*running)
    assert (second.status, third.status) == (200, None)
    assert len(bench.calls) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_gets_the_answer_that_was_not_delivered(bench: Bench, stream: bool) -> None:
    body = BODY | {"stream": stream}
    await undelivered(bench, body)
    (call,) = bench.calls
    retry = await caller(bench, body, x_stainless_retry_count="1").run()
    assert retry.status == 200
    assert f"chatcmpl-{call.call_id}".encode() in retry.text
    assert len(bench.calls) == 1
    again = await caller(bench, body, x_stainless_retry_count="2").run()
    assert len(bench.calls) == 2
    assert f"chatcmpl-{call.call_id}".encode() not in again.text


@pytest.mark.parametrize(
    ("body", "headers", "key"),
    [
        (BODY, {}, "key"),
        (BODY, {"x_stainless_retry_count": "0"}, "key"),
        (BODY, {"x_stainless_retry_count": "often"}, "key"),
        (BODY | {"seed": 1}, {"x_stainless_retry_count": "1"}, "key"),
        (BODY, {"x_stainless_retry_count": "1"}, "other"),
        (BODY, {"x_stainless_retry_count": "1", "idempotency_key": "new"}, "key"),
    ],
    ids=["no header", "first try", "no number", "other body", "other claim", "other key"],
)
async def test_only_a_retry_gets_it(bench: Bench, body: Any, headers: dict[str, str], key: str) -> None:
    await undelivered(bench)
    await caller(bench, body, key=key, **headers).run()
    assert len(bench.sampler.requests) == 2


async def test_a_client_that_leaves_while_it_is_sampled_leaves_nothing(
    bench: Bench, gate: GatedSampler
) -> None:
    leaver = caller(bench, x_stainless_retry_count="0")
    running = asyncio.create_task(leaver.run())
    await until(lambda: gate.started == 1)
    leaver.hang_up()
    await running
    assert (gate.cancelled, bench.calls) == (1, [])
    gate.go.set()
    retry = await caller(bench, x_stainless_retry_count="1").run()
    assert (retry.status, len(bench.calls)) == (200, 1)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEYS", 3)
    monkeypatch.setattr(idempotency, "MAX_UNDELIVERED", 2)
    originals = IdempotencyCache()
    keyed = [fingerprint_of({"idempotency-key": f"k{number}"}, CHAT, b"{}") for number in range(5)]
    plain = [fingerprint_of({}, CHAT, f"{number}".encode()) for number in range(5)]
    for number, mark in enumerate([*keyed, *plain]):
        with originals.attempt(mark) as attempt:
            attempt.call_id = f"call{number}"
    assert [originals.take(mark) for mark in keyed] == [None, None, "call2", "call3", "call4"]
    repeated = [fingerprint_of({"x-stainless-retry-count": "1"}, CHAT, f"{n}".encode()) for n in range(5)]
    assert [originals.take(mark) for mark in repeated] == [None, None, None, "call8", "call9"]


async def test_what_is_remembered_goes_with_the_claim(bench: Bench) -> None:
    await undelivered(bench)
    bench.gateway.forget(CLAIM.episode_uuid, CLAIM.attempt)
    await caller(bench, x_stainless_retry_count="1").run()
    assert len(bench.calls) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_during_recording_is_not_sampled_again(
    bench: Bench, book: WatchedBook, stream: bool
) -> None:
    """The first client left after its sample was complete; its call is recorded whatever the retry does."""
    book.go = asyncio.Event()
    body = BODY | {"stream": stream}
    leaver, retry = caller(bench, body), caller(bench, body, x_stainless_retry_count="1")
    first = asyncio.create_task(leaver.run())
    await until(lambda: book.recording == 1)
    leaver.hang_up()
    second = asyncio.create_task(retry.run())
    for _ in range(20):
        await asyncio.sleep(0)
    book.go.set()
    await asyncio.gather(first, second)
    (call,) = bench.calls
    assert retry.status == 200
    assert f"chatcmpl-{call.call_id}".encode() in retry.text
    assert len(bench.sampler.requests) == 1


async def test_a_request_that_fails_while_it_is_recorded_leaves_no_choice(bench: Bench) -> None:
    """All choices of a request are recorded together."""
    written: list[int] = []

    async def full(claim: OpenClaim, calls: Sequence[Call]) -> None:
        written.append(len(calls))
        raise GatewayError(503, "store_full", "the disk is full")

    record, bench.claims.record = bench.claims.record, full  # type: ignore[method-assign]
    failed = await caller(bench, BODY | {"n": 3}).run()
    assert (failed.status, written, bench.calls) == (503, [3], [])
    bench.claims.record = record  # type: ignore[method-assign]
    again = await caller(bench, BODY | {"n": 3}, x_stainless_retry_count="1").run()
    assert len(again.json()["choices"]) == len(bench.calls) == 3
    assert [call.fork_reason for call in bench.calls] == [None, "sampled_again", "sampled_again"]
