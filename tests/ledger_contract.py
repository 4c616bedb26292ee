"""What every `EpisodeStore` does: the tests that each of them has to pass.

A module with a fixture `reopen` makes a class of `StoreContract`: the first call gives a store, the next ones
what a process finds that starts after the first was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from tinkerscript.server.store.episode_store import EpisodeStore, WriteBatch

from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.trainer_link.messages import RecordedOutcome

Reopen = Callable[[], EpisodeStore]


async def leading(reopen: Reopen) -> EpisodeStore:
    """A store that may write."""
    store = reopen()
    await store.lead()
    return store


def episode(uuid: str = "e", sequence: int = 1) -> EpisodeRecord:
    return EpisodeRecord(
        uuid=uuid,
        sequence=sequence,
        episode_type="eval",
        group_id="g",
        digest=b"digest",
        payload=b'{"input": 1}',
        pool="p",
        group_size=4,
    )


def call(name: str, parent: str | None = None) -> Call:
    return Call(
        call_id=name,
        parent_id=parent,
        new_prompt=pack_ids([1, 2]),
        sampled=pack_ids([3]),
        logprobs=pack_logprobs([-0.5]),
        stop_reason="stop",
        policy_version=4,
    )


async def calls_of(store: EpisodeStore, each: EpisodeRecord, attempt: int) -> list[Call]:
    (calls,) = await store.calls([(each, attempt)])
    return calls


def fields(each: EpisodeRecord) -> dict[str, object]:
    not_stored = {"renewed_at", "ends_at", "calls_in_flight"}
    return {name: getattr(each, name) for name in EpisodeRecord.__slots__ if name not in not_stored}


class StoreContract:
    """One test for each promise."""

    async def test_what_is_committed_survives(self, reopen: Reopen) -> None:
        store, first, second = await leading(reopen), episode(), episode("f", 2)
        store.add(second)
        store.add(first)
        first.state, first.claimants, first.lease_s, first.policy_version = "claimed", ["c", "d"], 12.5, 7
        first.request_ids, first.forgiven, first.claimed_at = ["", "request"], 1, 1e9
        first.offered = first.dropped = True
        first.failures.append(Failure(kind="aborted", message="ü", attempt=1, client_uuid="c"))
        store.save(first)
        await store.durable()
        loaded = await reopen().load()
        assert [fields(each) for each in loaded] == [fields(first), fields(second)]
        assert loaded[0].failures == first.failures

    async def test_what_is_not_committed_is_not_visible(
        self, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, each = await leading(reopen), episode()
        write = store.write
        before: list[object] = []

        async def look_and_write(batch: WriteBatch) -> None:
            before.extend([await reopen().load(), await calls_of(store, each, 1)])
            await write(batch)

        monkeypatch.setattr(store, "write", look_and_write)
        store.add(each)
        store.add_call(each, 1, call("a"))
        await store.durable()
        assert before == [[], []]
        assert len(await reopen().load()) == 1
        assert [each.call_id for each in await calls_of(store, each, 1)] == ["a"]

    async def test_a_stored_episode_is_a_copy(self, reopen: Reopen) -> None:
        store, each = await leading(reopen), episode()
        store.add(each)
        await store.durable()
        each.state = "failed"
        assert (await reopen().load())[0].state == "registered"

    async def test_calls_keep_their_order_and_their_claim(self, reopen: Reopen) -> None:
        store, each, other = await leading(reopen), episode(), episode("f", 2)
        for number in range(3):
            store.add_call(each, 1, call(f"one-{number}"))
        store.add_call(each, 2, call("two", parent="x"))
        store.add_call(other, 1, call("other"))
        await store.close()
        again = await leading(reopen)
        assert [found.call_id for found in await calls_of(again, each, 1)] == ["one-0", "one-1", "one-2"]
        assert await calls_of(again, each, 2) == [call("two", parent="x")]
        both = await again.calls([(other, 1), (each, 2), (each, 3)])
        assert [[found.call_id for found in calls] for calls in both] == [["other"], ["two"], []]
        again.drop_calls(each, 1)
        await again.durable()
        assert await calls_of(again, each, 1) == []
        assert len(await calls_of(again, other, 1)) == 1

    async def test_a_result_lives_until_it_is_acknowledged(self, reopen: Reopen) -> None:
        store, each = await leading(reopen), episode()
        each.claimants = ["c"]
        store.add(each)
        store.add_call(each, 1, call("a"))
        each.state, each.reward, each.result, each.result_digest = "ended", 0.25, b"{}", b"d"
        store.save(each)
        await store.durable()
        found = (await reopen().load())[0]
        assert (found.reward, found.result, found.payload) == (0.25, b"{}", each.payload)
        each.state, each.acknowledged, each.payload, each.result = "accepted", True, b"", b""
        store.save(each)
        await store.durable()
        found = (await reopen().load())[0]
        assert (found.state, found.result, found.payload, found.result_digest) == ("accepted", b"", b"", b"d")
        assert await calls_of(store, each, 1) == []

    async def test_after_commit_never_runs_before_it_returns(self, reopen: Reopen) -> None:
        store = await leading(reopen)
        ran = asyncio.Event()
        store.after_commit(ran.set)
        assert not ran.is_set()
        await store.durable()
        assert ran.is_set()
        await store.durable()

    async def test_a_waiter_that_is_cancelled_harms_nobody(self, reopen: Reopen) -> None:
        store = await leading(reopen)
        store.add(episode())
        impatient = asyncio.ensure_future(store.durable())
        patient = asyncio.ensure_future(store.durable())
        await asyncio.sleep(0)
        impatient.cancel()
        await patient
        assert len(await reopen().load()) == 1

    async def test_outcomes_are_read_while_served_and_after(self, reopen: Reopen) -> None:
        store, first, second = await leading(reopen), episode(), episode("f", 2)
        store.add(first)
        store.add(second)
        first.state, first.acknowledged = "accepted", True
        await store.durable()
        expected = {"e": RecordedOutcome("accepted", True), "f": RecordedOutcome("registered", False)}
        assert await store.outcomes(["e", "f", "unknown"]) == expected
        assert await reopen().outcomes(["f"]) == {"f": expected["f"]}
        assert await store.outcomes([]) == {}

    async def test_any_text_survives(self, reopen: Reopen) -> None:
        """PostgreSQL's text has no U+0000; a client may send it."""
        texts = [
            "a\0b",
            "\x01",
            "\x010\x011",
            "\0\x01\0",
            "'\"\\\n\r\t%s",
            "\u2028 \U0001f600 \x7f",
            "\\u0000",
        ]
        store, stored = await leading(reopen), list[EpisodeRecord]()
        for number, text in enumerate(texts):
            each = replace(episode(f"e{text}", number), group_id=text, pool=text)
            each.claimants, each.request_ids = [text, "x"], ["", text]
            each.failures.append(Failure(kind="aborted", message=text, attempt=1, client_uuid=text))
            stored.append(each)
            store.add(each)
        await store.durable()
        loaded = await reopen().load()
        assert [fields(each) for each in loaded] == [fields(each) for each in stored]
        assert set(await store.outcomes([each.uuid for each in stored])) == {each.uuid for each in stored}

    async def test_any_bytes_survive(self, reopen: Reopen) -> None:
        data = bytes(range(256)) * 40_000
        store, each, long = await leading(reopen), replace(episode(), payload=data), call("long")
        long = msgspec.structs.replace(
            long, sampled=pack_ids([3] * 100_000), logprobs=pack_logprobs([-0.5] * 100_000)
        )
        each.state, each.result, each.reward = "ended", data[::-1], -0.1
        store.add(each)
        for _ in range(3):
            store.add_call(each, 1, long)
        await store.durable()
        assert [fields(found) for found in await reopen().load()] == [fields(each)]
        assert await calls_of(store, each, 1) == [long] * 3

    async def test_calls_that_are_dropped_at_once_are_never_stored(self, reopen: Reopen) -> None:
        store, each = await leading(reopen), episode()
        store.add(each)
        store.add_call(each, 1, call("a"))
        store.drop_calls(each, 1)
        store.add_call(each, 2, call("b"))
        await store.durable()
        assert await calls_of(store, each, 1) == []
        assert [found.call_id for found in await calls_of(store, each, 2)] == ["b"]

    async def test_transcripts_live_until_the_outcome_is_acknowledged(self, reopen: Reopen) -> None:
        store, each = await leading(reopen), episode()
        store.add(each)
        store.add_transcript(each, 1, b"first")
        store.add_transcript(each, 1, b"again\0")
        store.add_transcript(each, 2, b"second")
        await store.durable()
        other = episode("other", 2)
        store.add(other)
        await store.durable()
        assert await reopen().transcribed([each, other]) == {each.uuid}
        assert await reopen().transcripts(each) == {1: b"again\0", 2: b"second"}
        store.add_transcript(each, 2, b"newer")
        await store.durable()
        assert await store.transcripts(each) == {1: b"again\0", 2: b"newer"}
        each.state, each.acknowledged = "failed", True
        store.save(each)
        await store.durable()
        assert await reopen().transcripts(each) == {}
        assert await reopen().transcribed([each, other]) == set()
