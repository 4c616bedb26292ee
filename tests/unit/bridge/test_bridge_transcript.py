"""Transcripts: what Inspect recorded of an episode comes out again, within the bounds, whatever is in it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard
from inspect_ai.event import InfoEvent
from inspect_ai.log import EvalSample, resolve_sample_events_data
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.scorer import Score

from inspect_tinker_bridge import TaskFailedError, TaskRunner, load_inspect_task, score_episode
from inspect_tinker_bridge.episodes import GenerateRequest
from inspect_tinker_bridge.records import MAX_JSON_BYTES, pack_transcript
from tinkerscript.page.transcript_view import TRANSCRIPT_BYTES

TASKS = '''
from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, match, scorer
from inspect_ai.solver import generate
from inspect_ai.tool import tool
from inspect_ai.util import store

@tool
def look():
    async def execute(where: str) -> str:
        """Look.

        Args:
            where: Where.
        """
        store().set("looked", where)
        return "nothing " * 50 + where
    return execute

@scorer(metrics=[accuracy()])
def broken():
    async def score(state, target) -> Score:
        raise ValueError("the scorer broke")
    return score

@task
def search():
    sample = Sample("Find it.", target="x", id="s")
    return Task(dataset=[sample], solver=react(tools=[look()]), scorer=match())

@task
def failing():
    return Task(dataset=[Sample("Say x.", target="x", id="s")], solver=generate(), scorer=broken())
'''


class Looks:
    """Looks `turns` times, then submits."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        self.left -= 1
        if self.left < 0:
            return used(ModelOutput.for_tool_call("p", "submit", {"answer": "x"}))
        return used(ModelOutput.for_tool_call("p", "look", {"where": f"place {self.left}"}))


def used(output: ModelOutput) -> ModelOutput:
    """Without usage Inspect counts the tokens itself, for which it downloads a vocabulary."""
    return output.model_copy(update={"usage": ModelUsage(total_tokens=2)})


class Says:
    async def generate(self, request: GenerateRequest) -> ModelOutput:
        return used(ModelOutput.from_content("p", "x"))


class Refuses:
    async def generate(self, request: GenerateRequest) -> ModelOutput:
        raise ConnectionError("the model is gone")


async def recorded(
    tmp_path: Path, task: str, policy: Any, error: type[Exception] | None = None
) -> EvalSample:
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    info = load_inspect_task(f"{tmp_path}/tasks.py@{task}")
    records: list[EvalSample] = []
    async with TaskRunner(info) as runner:
        if error is None:
            outcome = await runner.run(info.samples[0], policy, on_record=records.append)
            if outcome.error is not None:
                with pytest.raises(TaskFailedError):
                    score_episode(outcome)
        else:
            with pytest.raises(error):
                await runner.run(info.samples[0], policy, on_record=records.append)
    (record,) = records
    return record


def unpacked(data: bytes) -> EvalSample:
    sample = EvalSample.model_validate_json(zstandard.ZstdDecompressor().decompress(data))
    return resolve_sample_events_data(sample)


async def test_what_inspect_recorded_comes_out_again(tmp_path: Path) -> None:
    record = await recorded(tmp_path, "search", Looks(3))
    found = unpacked(pack_transcript(record, 2**20))
    assert found.model_dump(exclude={"epoch", "events_data"}, exclude_none=True) == record.model_dump(
        exclude={"epoch", "events_data"}, exclude_none=True
    )
    kinds = [event.event for event in found.events]
    assert {"model", "tool", "store", "score"} <= set(kinds)
    assert found.store == {"looked": "place 0"}
    assert found.epoch == 1


async def test_what_calls_have_in_common_is_there_once(tmp_path: Path) -> None:
    few, many = [await recorded(tmp_path, "search", Looks(n)) for n in (10, 40)]
    sizes = [len(zstandard.ZstdDecompressor().decompress(pack_transcript(r, 2**24))) for r in (few, many)]
    assert sizes[1] < 5 * sizes[0]  # Four times the turns; each prompt repeats those before it.


@pytest.mark.parametrize(
    ("task", "policy", "error"), [("failing", Says(), None), ("search", Refuses(), ConnectionError)]
)
async def test_an_episode_that_fails_has_a_record(
    tmp_path: Path, task: str, policy: Any, error: type[Exception] | None
) -> None:
    found = unpacked(pack_transcript(await recorded(tmp_path, task, policy, error), 2**20))
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
