"""Who waits for the run's end hears of it, and a server that is stopped then stays until all have."""

from __future__ import annotations

import asyncio

from clock import Clock
from tinkerscript.server.episodes.activity import LATELY_S, ClientActivity, RunEnd


async def test_whoever_waits_hears_of_it_at_once(clock: Clock) -> None:
    end = RunEnd(ClientActivity(clock))
    waiting = [asyncio.create_task(end.wait(f"c{number}", 3600)) for number in range(3)]
    await asyncio.sleep(0)
    end.set(True)
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await end.wait("later", 3600)
    end.set(False)
    assert not await end.wait("c1", 0.0), "another trainer goes on"


async def test_a_server_that_closes_lets_nobody_wait(clock: Clock) -> None:
    end = RunEnd(ClientActivity(clock))
    waiting = asyncio.create_task(end.wait("c", 3600))
    await asyncio.sleep(0)
    end.close()
    assert not await waiting
    assert not await end.wait("c", 3600)


async def test_the_farewell_lasts_until_those_know_who_came_lately(clock: Clock) -> None:
    activity = ClientActivity(clock)
    end = RunEnd(activity, farewell_s=3600)
    await end.all_told()  # The run goes on: nobody is waited for.
    activity.seen("gone long ago")
    clock.now += LATELY_S + 1
    activity.seen("claims")
    activity.seen("waits")
    end.set(True)
    farewell = asyncio.create_task(end.all_told())
    assert await end.wait("waits", 0.0)
    await asyncio.sleep(0)
    assert not farewell.done(), "one that works on an episode has not asked yet"
    end.told("claims")
    await farewell


async def test_the_farewell_has_an_end(clock: Clock) -> None:
    activity = ClientActivity(clock)
    activity.seen("dead")
    end = RunEnd(activity, farewell_s=0.01)
    end.set(True)
    farewell = asyncio.create_task(end.all_told())
    done, _ = await asyncio.wait({farewell}, timeout=10)
    assert farewell in done
