"""Transcripts: what Inspect recorded of an episode comes out again, within the bounds, whatever is in it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import zstandard
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.event import InfoEvent
from inspect_ai.log import EvalSample, resolve_sample_events_data
from inspect_ai.scorer import Score, Target, match
from inspect_ai.solver import TaskState, generate
from inspect_ai.tool import Tool, ToolCall, tool
from inspect_ai.util import store

from bridge_groups import scoring
from bridge_parts import Scripted, said
from inspect_tinker_bridge import TaskFailedError, TaskRunner, load_inspect_task, score_episode
from inspect_tinker_bridge.records import MAX_JSON_BYTES, pack_transcript
from tinkerscript.page.transcript_view import TRANSCRIPT_BYTES

SAMPLE = Sample("Find x.", target="x", id="s")


@tool
def look() -> Tool:
    async def execute(where: str) -> str:
        """Look.

        Args:
            where: Where.
        """
        store().set("looked", where)
        return "nothing " * 50 + where

    return execute


@scoring
async def broken(state: TaskState, target: Target) -> Score:
    raise ValueError("the scorer broke")


SEARCH = Task(dataset=[SAMPLE], solver=react(tools=[look()]), scorer=match())
FAILING = Task(dataset=[SAMPLE], solver=generate(), scorer=broken())


def looking(turns: int) -> Scripted:
    """Looks `turns` times, then submits."""
    calls = [ToolCall(id=f"{n}", function="look", arguments={"where": f"place {n}"}) for n in range(turns)]
    submitted = ToolCall(id="last", function="submit", arguments={"answer": "x"})
    return Scripted(*(said("", call) for call in [*calls, submitted]))


async def recorded(task: Task, policy: Scripted, error: type[Exception] | None = None) -> EvalSample:
    info = load_inspect_task(task)
    records: list[EvalSample] = []
    async with TaskRunner(info) as runner:
        run = runner.run(info.samples[0], policy, on_record=records.append)
        if error is None:
            outcome = await run
            if outcome.error is not None:
                with pytest.raises(TaskFailedError):
                    score_episode(outcome)
        else:
            with pytest.raises(error):
                await run
    (record,) = records
    return record


def unpacked(data: bytes) -> EvalSample:
    sample = EvalSample.model_validate_json(zstandard.ZstdDecompressor().decompress(data))
    return resolve_sample_events_data(sample)


async def test_what_inspect_recorded_comes_out_again() -> None:
    record = await recorded(SEARCH, looking(3))
    found = unpacked(pack_transcript(record, 2**20))
    seen = [each.model_dump(exclude={"epoch", "events_data"}, exclude_none=True) for each in (found, record)]
    assert seen[0] == seen[1]
    kinds = [event.event for event in found.events]
    assert {"model", "tool", "store", "score"} <= set(kinds)
    assert found.store == {"looked": "place 2"}
    assert found.epoch == 1


async def test_what_calls_have_in_common_is_there_once() -> None:
    few, many = [await recorded(SEARCH, looking(n)) for n in (10, 40)]
    sizes = [len(zstandard.ZstdDecompressor().decompress(pack_transcript(r, 2**24))) for r in (few, many)]
    assert sizes[1] < 5 * sizes[0]  # Four times the turns; each prompt repeats those before it.


@pytest.mark.parametrize(
    ("task", "policy", "error"),
    [(FAILING, Scripted("x"), None), (SEARCH, Scripted(ConnectionError("gone")), ConnectionError)],
)
async def test_an_episode_that_fails_has_a_record(
    task: Task, policy: Scripted, error: type[Exception] | None
) -> None:
    found = unpacked(pack_transcript(await recorded(task, policy, error), 2**20))
    assert found.error is not None
    assert "broke" in found.error.message or "gone" in found.error.message
    assert any(event.event == "error" for event in found.events)


def sample(**fields: Any) -> EvalSample:
    return EvalSample(id="s", epoch=7, input="in", target="t", **fields)


def random_text(chars: int) -> str:
    """Text that does not compress."""
    return "".join(random.Random(chars).choices("0123456789abcdefghijklmnopqrstuvwxyz", k=chars))


@pytest.mark.parametrize("chars", [30_000, 3_000_000])
def test_long_texts_are_cut_to_the_bound(chars: int) -> None:
    text = random_text(chars)
    data = pack_transcript(sample(events=[InfoEvent(data=text), InfoEvent(data="short")]), 16_384)
    assert 0 < len(data) <= 16_384
    long, short = unpacked(data).events
    assert isinstance(long, InfoEvent)
    assert isinstance(short, InfoEvent)
    assert str(long.data).startswith(text[:200])
    assert str(long.data).endswith("more characters)")
    assert short.data == "short"


def test_what_is_long_before_compression_is_cut_too() -> None:
    """Nobody who reads it needs more memory than the bound."""
    data = pack_transcript(sample(events=[InfoEvent(data="a" * (MAX_JSON_BYTES + 1))]), 2**20)
    assert 0 < len(data) < 2000
    assert len(zstandard.ZstdDecompressor().decompress(data)) < 30_000
    assert TRANSCRIPT_BYTES >= MAX_JSON_BYTES


def test_of_too_many_events_the_middle_is_left_out() -> None:
    events = [InfoEvent(data=f"{n} {random_text(100 + n % 7)}") for n in range(3000)]
    found = unpacked(pack_transcript(sample(events=events), 40_000)).events
    told = [str(event.data) for event in found if isinstance(event, InfoEvent)]
    assert len(told) == 201
    assert told[100] == "2800 events are left out"
    assert (told[0].split()[0], told[-1].split()[0]) == ("0", "2999")


@pytest.mark.parametrize(
    "value",
    [
        *("\ud800 alone", float("nan"), float("inf"), object(), {1: {2, 3}}, b"\xff\xfe"),
        pytest.param(json.loads("[" * 150 + "]" * 150), id="deep"),
    ],
)
def test_whatever_is_in_a_record_nothing_is_raised(value: Any) -> None:
    record = sample(store={"odd": value}, scores={"s": Score(value=float("nan"), explanation="\udfff?")})
    data = pack_transcript(record, 2**20)
    written = json.loads(zstandard.ZstdDecompressor().decompress(data))
    assert "odd" in written["store"]
    assert written["scores"]["s"]["value"] == "NaN"


def test_what_no_json_holds_is_left_out() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert pack_transcript(sample(store={"deep": deep}), 2**20) == b""


def test_a_bound_too_small_for_anything_leaves_nothing() -> None:
    assert pack_transcript(sample(), 10) == b""
