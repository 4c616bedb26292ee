"""The line of clients that long-poll: order, types, and no wake-up is lost."""

from __future__ import annotations

import asyncio

import pytest

from interchange_helpers import until
from tinkerscript.protocol import ClaimType
from tinkerscript.server.episodes.indexes import LongPollQueue, Wakeup

POOL = "pool"


async def stand_in_line(line: LongPollQueue, *types: ClaimType) -> list[asyncio.Task[Wakeup | None]]:
    tasks = [asyncio.create_task(line.wait(POOL, claim_type, 10)) for claim_type in types]
    await until(lambda: len(line) == len(types))
    return tasks


async def leave(*tasks: asyncio.Task[Wakeup | None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_has_waited_longest_is_woken_first() -> None:
    line = LongPollQueue()
    evaluator, first, second = await stand_in_line(line, "eval", "any", "train")
    line.notify(POOL, "train")
    assert (await first) is not None
    assert not second.done()
    line.notify(POOL, "train")
    assert (await second) is not None
    line.notify(POOL, "train")
    assert len(line) == 1
    assert not evaluator.done()
    await leave(evaluator)
    assert len(line) == 0


async def test_a_wakeup_that_cannot_be_used_is_passed_on_and_ends() -> None:
    line = LongPollQueue()
    first, second = await stand_in_line(line, "train", "train")
    line.notify(POOL, "train")
    wakeup = await first
    assert wakeup is not None
    again = asyncio.create_task(line.wait(POOL, "train", 10))
    assert line.pass_on(wakeup)
    assert await second == wakeup
    await asyncio.sleep(0)
    assert not line.pass_on(wakeup), "who joined after the episode came looked at it already"
    await leave(again)


async def test_a_wakeup_that_meets_a_cancellation_is_passed_on() -> None:
    line = LongPollQueue()
    leaving, staying = await stand_in_line(line, "any", "any")
    line.notify(POOL, "eval")
    leaving.cancel()
    assert await staying == Wakeup(POOL, "eval", 2)
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_waiting_ends_in_time() -> None:
    line = LongPollQueue()
    with pytest.raises(TimeoutError):
        await line.wait(POOL, "any", 0.01)
    assert len(line) == 0


async def test_everybody_looks_again() -> None:
    line = LongPollQueue()
    tasks = await stand_in_line(line, "any", "train", "eval")
    line.notify_all()
    assert await asyncio.gather(*tasks) == [None, None, None]


async def test_pools_have_lines_of_their_own_and_empty_ones_leave_nothing() -> None:
    line = LongPollQueue()
    mine = asyncio.create_task(line.wait("mine", "any", 10))
    theirs = asyncio.create_task(line.wait("theirs", "train", 10))
    await until(lambda: len(line) == 2)
    line.notify("nobody's", "train")
    line.notify("theirs", "eval")
    await asyncio.sleep(0)
    assert len(line) == 2
    line.notify("theirs", "train")
    assert (await theirs) is not None
    assert not mine.done()
    await leave(mine)
    assert len(line) == 0


async def test_copies_of_an_answered_request_look_again() -> None:
    line = LongPollQueue()
    key = ("client", "request")
    copies = [asyncio.create_task(line.wait(POOL, "any", 10, key)) for _ in range(2)]
    other = asyncio.create_task(line.wait(POOL, "any", 10, ("client", "other")))
    await until(lambda: len(line) == 3)
    line.answered(key)
    line.notify(POOL, "train")
    assert await asyncio.gather(*copies) == [None, None]
    wakeup = await other
    assert wakeup is not None, "a wake-up does not go to a copy that is leaving"
