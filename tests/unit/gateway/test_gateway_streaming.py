"""Streamed replies over the ASGI application: what is sent when, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asgi_caller import AsgiCaller
from gateway_bench import CLAIM, Bench, WaitingSampler
from interchange_helpers import until
from tinkerscript.gateway import streamed_reply
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.rollouts.call import pack_ids, pack_logprobs
from tinkerscript.sampler import Progress, ProgressCallback, SampleRequest, SampleResult
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
KEY = {"authorization": "Bearer key"}
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def events_of(text: str) -> list[Any]:
    """The data of each event; the last one is `[DONE]` or an error."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


async def chunks(bench: Bench, *args: Any, **fields: Any) -> list[Any]:
    response = await bench.post(*args, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def deltas(events: list[Any], index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


def joined(events: list[Any], field: str, index: int = 0) -> str:
    return "".join(delta.get(field, "") for delta in deltas(events, index))


async def test_a_stream_is_openais(bench: Bench) -> None:
    bench.answer = "hello you"
    *events, usage, done = await chunks(bench, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert deltas(events)[0] == {"role": "assistant", "content": ""}
    assert len(deltas(events)) == 10  # The role, eight letters (the space waits for the next one), the end.
    assert joined(events, "content") == "hello you"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 9 + ["stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["usage"] for event in events} == {None}
    assert usage["choices"] == []
    (call,) = bench.calls
    assert usage["usage"]["completion_tokens"] == len(call.sampled_ids)
    assert {event["id"] for event in events} == {f"chatcmpl-{call.call_id}"}
    assert (events[-1]["system_fingerprint"], events[-1]["model"]) == ("policy-3", "tiny")
    assert "usage" not in (await chunks(bench))[0]


async def test_a_streamed_message_is_found_again(bench: Bench) -> None:
    """The text of all deltas extends the recorded ids in the next turn."""
    bench.answer = "<think>\nhm \n</think>\n\nSo: é "
    events = await chunks(bench)
    message = {
        "role": "assistant",
        "content": joined(events, "content"),
        "reasoning_content": joined(events, "reasoning_content"),
    }
    assert (message["content"], message["reasoning_content"]) == ("So: é", "hm")
    await bench.ask([{"role": "user", "content": "hi"}, message, {"role": "user", "content": "more"}])
    first, second = bench.calls
    assert second.parent_id == first.call_id


async def test_tool_calls_come_at_the_end(bench: Bench) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    bench.answer = f"so {call}{call}"
    events = await chunks(bench, tools=TOOLS, max_tokens=200)
    assert joined(events, "content") == "so"
    *_, called, end = deltas(events)
    assert end == {}
    assert [each["index"] for each in called["tool_calls"]] == [0, 1]
    assert {each["function"]["arguments"] for each in called["tool_calls"]} == {'{"a": 1}'}
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    recorded = json.loads(bench.calls[0].reply)
    assert [each["id"] for each in recorded["tool_calls"]] == [each["id"] for each in called["tool_calls"]]


async def test_before_the_first_event_an_error_is_an_ordinary_one(bench: Bench) -> None:
    response = await bench.post("x" * 5000, stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_claim_that_is_lost_midway_ends_the_stream_with_the_reason(bench: Bench) -> None:
    def lose(prompt: list[int]) -> str:
        bench.claims.lose(CLAIM, "the lease ran out")
        return "late"

    bench.answer = lose
    *told, error = await chunks(bench)
    assert joined(told, "content") == "late"
    assert error == {
        "error": {
            "message": "the lease ran out",
            "type": "invalid_request_error",
            "param": None,
            "code": "claim_lost",
        }
    }
    assert bench.calls == []


class Reporting(ScriptedSampler):
    """Reports what `reports` makes of the sampled ids, whatever was really sampled."""

    def __init__(self, ids: list[int], reports: Callable[[bytes], list[tuple[int, bytes]]]) -> None:
        super().__init__(lambda prompt: ids)
        self._reports = reports

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        result = await super().sample(request)
        assert progress is not None
        for offset, sampled in self._reports(result.sequences[0].sampled):
            logprobs = pack_logprobs([-0.5] * (len(sampled) // 4))
            progress(Progress(index=0, offset=offset, sampled=sampled, logprobs=logprobs))
            for _ in range(5):
                await asyncio.sleep(0)
        return result


@pytest.mark.parametrize(
    "reports",
    [
        lambda s: [(0, s[:8]), (0, s[:8]), (1, s[4:12]), (0, s[:4]), (3, s[12:])],
        lambda s: [(0, s[:8]), (3, s[12:16])],
        lambda s: [(2, s[8:])],
        lambda s: [],
    ],
    ids=["repeated", "gap", "begins late", "none"],
)
async def test_repeated_lost_and_missing_reports_are_harmless(
    bench: Bench, reports: Callable[[bytes], list[tuple[int, bytes]]]
) -> None:
    ids = [token for char in "a word" for token in bench.tokenizer.encode(char)]
    bench.use(Reporting(ids, reports))
    events = await chunks(bench, return_token_ids=True)
    assert joined(events, "content") == "a word"
    told = [token for event in events[:-1] for c in event["choices"] for token in c.get("token_ids", [])]
    assert told == ids


@pytest.mark.parametrize(
    "reports",
    [lambda s: [(0, s[:8]), (0, pack_ids([1, 2, 3]))], lambda s: [(0, pack_ids([1, 2]))]],
    ids=["noticed at once", "noticed at the end"],
)
async def test_an_engine_that_began_anew_ends_the_stream(
    bench: Bench, reports: Callable[[bytes], list[tuple[int, bytes]]]
) -> None:
    bench.use(Reporting(bench.tokenizer.encode("abc"), reports))
    events = await chunks(bench)
    assert events[-1]["error"]["code"] == "engine_restarted"
    assert bench.calls == []


class CountingBook(MemoryClaimBook):
    """Counts the calls in flight."""

    in_flight_now = 0

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> int:
        self.in_flight_now += 1
        return max_tokens

    def end(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> None:
        self.in_flight_now -= 1


class Half(WaitingSampler):
    """Reports one token and no more."""

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        assert progress is not None
        progress(Progress(index=0, offset=0, sampled=pack_ids([72]), logprobs=pack_logprobs([-1.0])))
        return await super().sample(request, progress)


async def test_a_client_that_goes_away_midway_leaves_nothing(byte_model: Path) -> None:
    book, sampler = CountingBook({"key": CLAIM}), Half()
    bench = Bench(byte_model, book)
    bench.use(sampler)
    caller = AsgiCaller(bench.app, "/v1/chat/completions", BODY, KEY)
    running = asyncio.create_task(caller.run())
    await until(lambda: bool(caller.text), "the first event")
    assert book.in_flight_now == 1
    caller.hang_up()
    await running
    assert sampler.cancelled.is_set()
    assert (book.in_flight_now, bench.calls) == (0, [])
    await bench.client.aclose()


async def test_a_silent_stream_is_kept_alive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_reply, "COMMENT_EVERY_S", 0.01)
    bench.use(WaitingSampler())
    caller = AsgiCaller(bench.app, "/v1/chat/completions", BODY, KEY)
    running = asyncio.create_task(caller.run())
    await until(lambda: caller.text.count(b": ping\n\n") == 2, "two pings")
    caller.hang_up()
    await running
    assert b'"role":"assistant"' in caller.text.partition(b"\n\n")[0]
