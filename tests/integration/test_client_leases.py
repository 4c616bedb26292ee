"""Claims that must not be lost: repeated requests, heartbeats, and what a program learns when one is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from fake_exchange import Exchange

from interchange_helpers import until
from serving import serving
from tinkerscript.client import (
    AsyncTinkerScriptClient,
    Episode,
    Runner,
    RunStatistics,
    TinkerScriptClient,
    run,
)
from tinkerscript.errors import (
    ClaimLostError,
    ClientClosedError,
    RequestRefusedError,
)

SHORT_S = 0.15
"""A lease whose heartbeats come every 0.05 s at most."""


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "client"]


def test_what_follows_a_lost_reply_or_a_busy_server_repeats_the_request(exchange: Exchange, url: str) -> None:
    exchange.faults = list(product(("/claim_episode", "/end_episode"), (503, 0, 503)))
    with TinkerScriptClient(url) as client:
        first, second = client.begin_episode(), client.begin_episode()
        assert (first.episode_uuid, second.episode_uuid) == ("e0", "e1")
        for _ in range(2):
            client.end_episode(first, 1.0)
    assert len(exchange.ends) == 3
    assert len({end.model_dump_json() for end in exchange.ends}) == 1


def test_a_block_keeps_its_claim_alive_and_leaves_no_thread(exchange: Exchange, url: str) -> None:
    with TinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:
        with client.begin_episode() as episode:
            exchange.wait_for(lambda: exchange.beats["e0"] >= 3)
            client.end_episode(episode, 1.0)
        beats = exchange.beats["e0"]
        with client.begin_episode(heartbeat=False):
            time.sleep(SHORT_S)
        assert client.heartbeat_episode(episode).can_continue
        assert exchange.beats == {"e0": beats + 1}
        assert client_threads() == ["client"]
    assert client_threads() == []


def test_a_lost_claim_is_learned_from_a_heartbeat_in_a_block(exchange: Exchange, url: str) -> None:
    with TinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:

        def work() -> None:
            with client.begin_episode() as episode:
                episode.check()
                exchange.lost.add("e0")
                never = threading.Event()
                while not episode.lost:
                    never.wait(0.01)
                episode.check()

        with pytest.raises(ClaimLostError, match="the lease ran out"):
            work()
    assert exchange.aborted == [], "what is lost cannot be given back"


def test_a_lost_claim_is_learned_by_asking(exchange: Exchange, url: str) -> None:
    with TinkerScriptClient(url) as client:
        first, second, third = (client.begin_episode() for _ in range(3))
        exchange.lost |= {"e0", "e1", "e2"}
        assert not client.can_continue_episode(first).can_continue
        assert client.heartbeat_episode(second).reason == "the lease ran out"
        with pytest.raises(ClaimLostError):
            client.end_episode(third, 1.0)
        for episode in (first, second, third):
            with pytest.raises(ClaimLostError, match="the lease ran out"):
                episode.check()


def test_an_ended_episode_is_not_given_back_by_what_follows(exchange: Exchange, url: str) -> None:
    with TinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:
        episode = client.begin_episode()

        def work() -> None:
            with episode:
                client.end_episode(episode, 1.0)
                exchange.lost.add("e0")  # To the server it is over.
                raise KeyError

        with pytest.raises(KeyError):
            work()
        assert not episode.lost
        exchange.faults = [("/end_episode", 413)]
        with pytest.raises(RequestRefusedError), client.begin_episode() as other:
            client.end_episode(other, 1.0)
    assert [abort.episode_uuid for abort in exchange.aborted] == ["e1"], "a refused end leaves the claim open"


def test_the_blocks_own_error_is_seen_when_the_server_is_gone(exchange: Exchange) -> None:
    with serving(exchange) as url:  # type: ignore[arg-type]
        client = TinkerScriptClient(url, timeout_s=0.2)
        episode = client.begin_episode()
    with client, pytest.raises(KeyError), episode:
        raise KeyError


def test_a_block_that_raises_or_has_no_result_gives_its_episode_back(
    exchange: Exchange, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    exchange.queue.append("e3")
    with TinkerScriptClient(url) as client, caplog.at_level(logging.WARNING):
        with client.begin_episode():
            """A program that forgot its result."""
        assert "e0 is given back: its block ended without a result" in caplog.text
        with pytest.raises(KeyError), client.begin_episode():
            raise KeyError("target")
        with client.begin_episode() as given_back:
            client.abort_episode(given_back, "not today")
        with client.begin_episode() as ended:
            client.end_episode(ended, 1.0)
    aborts = [(each.episode_uuid, each.failure.kind) for each in exchange.aborted]
    assert aborts == [("e0", "no_result"), ("e1", "task_error"), ("e2", "aborted")]
    assert exchange.aborted[1].failure.message == "KeyError: 'target'"
    assert exchange.keys == [f"key-e{number}" for number in range(4)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_client_that_was_used_works_in_a_forked_process(exchange: Exchange, url: str) -> None:
    """As workers of multiprocessing, which inherit a ready-made client."""
    with TinkerScriptClient(url) as client:
        client.begin_episode()
        child = os.fork()
        if not child:
            try:
                client.end_episode(client.begin_episode(), 0.5)
            except BaseException:  # noqa: BLE001 - the child must not go on with the tests
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.end_episode(client.begin_episode(), 1.0)
    assert [each.reward for each in exchange.results.values()] == [0.5, 1.0]


@pytest.mark.parametrize("hold_s", [30.0, 0.0])
def test_close_ends_a_wait_of_another_thread_at_once(exchange: Exchange, url: str, hold_s: float) -> None:
    """Whether the server holds the request, or the client sleeps before the next."""
    exchange.queue.clear()
    exchange.hold_s = hold_s
    client = TinkerScriptClient(url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.begin_episode)
        exchange.wait_for(lambda: exchange.waiting >= (1 if hold_s else 4))
        began = time.monotonic()
        client.close()
        with pytest.raises(ClientClosedError):
            waiting.result(timeout=10)
    assert time.monotonic() - began < 2.0


async def test_an_async_block_is_cancelled_when_its_claim_is_lost(exchange: Exchange, url: str) -> None:
    async with AsyncTinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:
        episode = await client.begin_episode()

        async def work() -> None:
            async with episode:
                await until(lambda: exchange.beats["e0"] >= 2)
                exchange.lost.add("e0")
                await asyncio.get_running_loop().create_future()

        with pytest.raises(ClaimLostError, match="the lease ran out"):
            await work()
        assert episode.lost
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        with pytest.raises(TimeoutError):
            async with await client.begin_episode(), asyncio.timeout(0.01):
                await asyncio.get_running_loop().create_future()
    assert [abort.failure.message for abort in exchange.aborted] == ["TimeoutError"]
    assert len(asyncio.all_tasks()) == 1


async def test_the_runner_renews_all_that_it_works_on_at_once(exchange: Exchange, url: str) -> None:
    exchange.queue = [f"e{number}" for number in range(20)]
    everyone = asyncio.Barrier(20)

    async def rollout(episode: Episode) -> float:
        await everyone.wait()
        await until(lambda: exchange.beats[episode.episode_uuid] >= 3)
        return 1.0

    async with AsyncTinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:
        done = await Runner(rollout, client=client, concurrency=20, max_episodes=20).run()
    assert done == RunStatistics(claimed=20, ended=20)
    assert len(asyncio.all_tasks()) == 1


async def test_the_runner_cancels_a_rollout_whose_claim_is_lost(exchange: Exchange, url: str) -> None:
    exchange.lost.add("e1")
    cleaned: list[str] = []

    async def rollout(episode: Episode) -> float:
        if episode.episode_uuid == "e1":
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cleaned.append(episode.episode_uuid)
        return 1.0

    async with AsyncTinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:
        done = await Runner(rollout, client=client, concurrency=3, max_episodes=3).run()
    assert done == RunStatistics(claimed=3, ended=2, lost=1)
    assert cleaned == ["e1"]
    assert set(exchange.results) == {"e0", "e2"}
    assert exchange.aborted == []


def test_a_plain_function_learns_that_its_claim_is_lost(exchange: Exchange, url: str) -> None:
    exchange.lost |= {"e0", "e1"}
    waited = threading.Event()

    def rollout(episode: Episode) -> float:
        while not episode.lost and episode.episode_uuid != "e2":
            waited.wait(0.01)
        if episode.episode_uuid == "e0":
            episode.check()
        return 1.0

    with TinkerScriptClient(url, allow_discard_timeout=SHORT_S) as client:
        done = run(rollout, client=client, concurrency=3, max_episodes=3)
    assert done == RunStatistics(claimed=3, ended=1, lost=2)
    assert len(exchange.ends) == 1, "nothing is sent for a claim that is known to be lost"


def test_a_heartbeat_goes_on_over_an_outage(exchange: Exchange) -> None:
    with serving(exchange) as url:  # type: ignore[arg-type]
        client = TinkerScriptClient(url, allow_discard_timeout=SHORT_S, timeout_s=0.1)
        block = client.begin_episode()
        block.__enter__()
        exchange.wait_for(lambda: exchange.beats["e0"] >= 1)
    before = exchange.beats["e0"]
    with serving(exchange, port=int(url.rsplit(":", 1)[1])):  # type: ignore[arg-type]
        exchange.wait_for(lambda: exchange.beats["e0"] >= before + 2)
        block.__exit__(None, None, None)
    assert not block.lost
    client.close()
