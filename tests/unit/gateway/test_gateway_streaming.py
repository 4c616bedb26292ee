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
from sse_events import events_of
from tinkerscript.gateway import streamed_reply
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.rollouts.call import pack_ids, pack_logprobs
from tinkerscript.sampler import Progress, ProgressCallback, SampleRequest, SampleResult
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
KEY = {"authorization": "Bearer key"}
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def chunks(bench: Bench, **fields: Any) -> list[Any]:
    """The data of each event; the last one is `[DONE]` or an error."""
    return events_of(await bench.post(stream=True, **fields))


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
    (call,) = bench.calls
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(call.sampled_ids))
    assert {event["id"] for event in events} == {f"chatcmpl-{call.call_id}"}
    assert (events[-1]["system_fingerprint"], events[-1]["model"]) == ("policy-3", "tiny")
    assert "usage" not in (await chunks(bench))[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_ends_a_reply_is_no_part_of_its_text(bench: Bench, stream: bool) -> None:
    """Its turn goes on from the sampled ids all the same."""
    colon = bench.tokenizer.encode(":")[0]
    sampled = bench.tokenizer.encode("Observation:")
    bench.use(ScriptedSampler(lambda _: sampled))
    response = await bench.post(stop_token_ids=[colon], stream=stream)
    (call,) = bench.calls
    if stream:
        text = joined(events_of(response), "content")
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert (text, call.sampled_ids.tolist(), call.stop_reason) == ("Observation", sampled, "stop")
    said = [{"role": "assistant", "content": text}, {"role": "user", "content": "it rains"}]
    await bench.ask([*BODY["messages"], *said])
    assert bench.calls[1].parent_id == call.call_id


async def test_tool_calls_come_at_the_end(bench: Bench) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    bench.answer = f"so {call}{call}"
    events = await chunks(bench, tools=TOOLS, max_tokens=200)
    assert joined(events, "content") == "so"
    *_, called, end = deltas(events)
    assert end == {}
    recorded = json.loads(bench.calls[0].reply)["tool_calls"]
    assert called["tool_calls"] == [{"index": index, **each} for index, each in enumerate(recorded)]
    assert {each["function"]["arguments"] for each in recorded} == {'{"a": 1}'}
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.usefixtures("lose_claim")
async def test_a_claim_that_is_lost_midway_ends_the_stream_with_the_reason(bench: Bench) -> None:
    *told, error = await chunks(bench)
    assert joined(told, "content") == "late"
    expected = {"type": "invalid_request_error", "param": None, "code": "claim_lost"}
    assert error == {"error": {"message": "the lease ran out"} | expected}
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
