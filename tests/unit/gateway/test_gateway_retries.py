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
        self.started = 0
        self.failures: list[Exception] = []
        """Raised by the next requests, in turn."""

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.started += 1
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        return await self._inner.sample(request, progress)


class TellingBook(MemoryClaimBook):
    """Calls `on_record` whenever a request's calls have been recorded, before the gateway hears of it."""

    on_record: Callable[[], None] | None = None

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        await super().record(claim, calls)
        if self.on_record:
            self.on_record()
        await asyncio.sleep(0)


@pytest.fixture
async def bench(byte_model: Path) -> AsyncIterator[Bench]:
    bench = Bench(byte_model, TellingBook({"key": CLAIM, "other": OpenClaim("other", 1, 0)}))
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


def book(bench: Bench) -> TellingBook:
    assert isinstance(bench.claims, TellingBook)
    return bench.claims


def recorded(bench: Bench) -> list[Call]:
    return bench.calls


async def undelivered(bench: Bench, body: Any = BODY, **headers: str) -> AsgiCaller:
    """A request whose client disconnects after the reply was recorded and before it was sent."""
    leaver = caller(bench, body, **headers)
    book(bench).on_record = leaver.hang_up
    await leaver.run()
    book(bench).on_record = None
    assert leaver.status is None or body["stream"]
    assert b"[DONE]" not in leaver.text
    return leaver


async def test_equal_requests_are_both_sampled(bench: Bench) -> None:
    callers = [caller(bench), caller(bench), caller(bench, x_stainless_retry_count="0")]
    await asyncio.gather(*(each.run() for each in callers))
    late = await caller(bench, x_stainless_retry_count="1").run()
    texts = {each.json()["choices"][0]["message"]["content"] for each in [*callers, late]}
    assert len(texts) == len(recorded(bench)) == 4


async def test_one_key_is_one_call_while_it_is_in_flight(bench: Bench, gate: GatedSampler) -> None:
    callers = [caller(bench, idempotency_key="k") for _ in range(3)]
    await released(gate, *callers)
    assert gate.started == len(recorded(bench)) == 1
    assert {each.status for each in callers} == {200}
    assert callers[0].text == callers[1].text == callers[2].text


async def test_one_key_is_one_call_after_it_is_over(bench: Bench) -> None:
    first = await caller(bench, idempotency_key="k").run()
    again = await caller(bench, idempotency_key="k").run()
    other = await caller(bench, idempotency_key="k2").run()
    assert first.text == again.text != other.text
    assert len(recorded(bench)) == 2
    assert [call.idempotency_key for call in recorded(bench)] == ["k", "k2"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": True, "return_token_ids": True},
        {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "n": 2},
    ],
    ids=["plain", "n", "logprobs", "stream"],
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
    assert (after.status, len(recorded(bench))) == (200, 1 + fields.get("n", 1))
    if "stream" in fields:
        assert _told(after.text) == _told(before.text)
    else:
        assert after.text == before.text
    assert restarted.sampler.requests == []
    await restarted.client.aclose()


def _told(stream: bytes) -> dict[str, Any]:
    """The whole content of a stream, however it is split."""
    told: dict[str, Any] = {}
    for line in stream.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        told.update({name: event[name] for name in ("id", "created", "system_fingerprint")})
        told["usage"] = event.get("usage") or told.get("usage")
        for choice in event["choices"]:
            own = told.setdefault(choice["index"], {})
            for field in ("content", "reasoning_content"):
                own[field] = own.get(field, "") + (choice["delta"].get(field) or "")
            own.setdefault("tools", []).extend(choice["delta"].get("tool_calls", []))
            own.setdefault("logprobs", []).extend((choice["logprobs"] or {}).get("content") or [])
            own["end"] = choice["finish_reason"] or own.get("end")
    return told


async def test_what_was_recorded_in_part_is_sampled_again(bench: Bench, byte_model: Path) -> None:
    """A server that stopped between two choices of a request."""
    body = BODY | {"n": 3}
    await caller(bench, body, idempotency_key="k").run()
    del recorded(bench)[2:]
    restarted = Bench(byte_model, bench.claims)
    after = await caller(restarted, body, idempotency_key="k").run()
    assert len(after.json()["choices"]) == 3
    assert [call.fork_reason for call in recorded(bench)[2:]] == ["sampled_again"] * 3
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
    assert len(recorded(bench)) == 1


async def test_a_key_is_of_one_claim(bench: Bench) -> None:
    first = await caller(bench, idempotency_key="k").run()
    other = await caller(bench, key="other", idempotency_key="k").run()
    assert first.text != other.text
    assert len(bench.sampler.requests) == 2


async def test_a_waiting_request_takes_the_place_of_one_that_failed(bench: Bench, gate: GatedSampler) -> None:
    gate = GatedSampler(bench.sampler)
    gate.failures = [GatewayError(503, "engine_away", "away")]
    bench.use(gate)
    callers = [caller(bench, idempotency_key="k") for _ in range(3)]
    await released(gate, *callers)
    assert [each.status for each in callers] == [503, 200, 200]
    assert callers[1].text == callers[2].text
    assert gate.started == 2
    assert len(recorded(bench)) == 1


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
    assert len(recorded(bench)) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_gets_the_answer_that_was_not_delivered(bench: Bench, stream: bool) -> None:
    body = BODY | {"stream": stream}
    await undelivered(bench, body)
    assert len(recorded(bench)) == 1
    (call,) = recorded(bench)
    retry = await caller(bench, body, x_stainless_retry_count="1").run()
    assert retry.status == 200
    assert f"chatcmpl-{call.call_id}".encode() in retry.text
    assert len(recorded(bench)) == 1
    again = await caller(bench, body, x_stainless_retry_count="2").run()
    assert len(recorded(bench)) == 2
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


async def test_each_answer_that_was_not_delivered_goes_to_one_retry(bench: Bench) -> None:
    for _ in range(2):
        await undelivered(bench)
    retrying = [caller(bench, x_stainless_retry_count="1") for _ in range(3)]
    await asyncio.gather(*(each.run() for each in retrying))
    ids = [each.json()["id"] for each in retrying]
    assert len(set(ids)) == len(recorded(bench)) == 3


async def test_a_client_that_leaves_while_it_is_sampled_leaves_nothing(
    bench: Bench, gate: GatedSampler
) -> None:
    leaver = caller(bench, x_stainless_retry_count="0")
    running = asyncio.create_task(leaver.run())
    await until(lambda: gate.started == 1)
    leaver.hang_up()
    await running
    assert recorded(bench) == []
    gate.go.set()
    retry = await caller(bench, x_stainless_retry_count="1").run()
    assert (retry.status, len(recorded(bench))) == (200, 1)


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
    assert len(recorded(bench)) == 2


class SlowBook(MemoryClaimBook):
    """Records when `go` is set."""

    def __init__(self, claims: dict[str, OpenClaim]) -> None:
        super().__init__(claims)
        self.go = asyncio.Event()
        self.recording = 0

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        self.recording += 1
        await self.go.wait()
        await super().record(claim, calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_retry_during_recording_is_not_sampled_again(byte_model: Path, stream: bool) -> None:
    """The first client left after its sample was complete; its call is recorded whatever the retry does."""
    slow = SlowBook({"key": CLAIM})
    bench = Bench(byte_model, slow)
    body = BODY | {"stream": stream}
    leaver, retry = caller(bench, body), caller(bench, body, x_stainless_retry_count="1")
    first = asyncio.create_task(leaver.run())
    await until(lambda: slow.recording == 1)
    leaver.hang_up()
    second = asyncio.create_task(retry.run())
    for _ in range(20):
        await asyncio.sleep(0)
    slow.go.set()
    await asyncio.gather(first, second)
    assert retry.status == 200
    (call,) = bench.calls
    assert f"chatcmpl-{call.call_id}".encode() in retry.text
    assert len(bench.sampler.requests) == 1
    await bench.client.aclose()


async def test_a_request_that_fails_while_it_is_recorded_leaves_no_choice(bench: Bench) -> None:
    """All choices of a request are recorded together."""
    written: list[int] = []

    async def full(claim: OpenClaim, calls: Sequence[Call]) -> None:
        written.append(len(calls))
        raise GatewayError(503, "store_full", "the disk is full")

    record, bench.claims.record = bench.claims.record, full  # type: ignore[method-assign]
    failed = await caller(bench, BODY | {"n": 3}).run()
    assert (failed.status, written, recorded(bench)) == (503, [3], [])
    bench.claims.record = record  # type: ignore[method-assign]
    again = await caller(bench, BODY | {"n": 3}, x_stainless_retry_count="1").run()
    assert len(again.json()["choices"]) == len(recorded(bench)) == 3
    assert [call.fork_reason for call in recorded(bench)] == [None, "sampled_again", "sampled_again"]


async def test_parallel_first_requests_say_why_they_do_not_extend_each_other(
    bench: Bench, gate: GatedSampler
) -> None:
    other = BODY | {"messages": [{"role": "user", "content": "something else"}]}
    callers = [caller(bench, body) for body in (BODY, BODY, other)]
    await released(gate, *callers, started=3)
    reasons = Counter(call.fork_reason for call in recorded(bench))
    assert reasons == {None: 1, "sampled_again": 1, "new_conversation": 1}
