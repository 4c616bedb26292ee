"""What the limit of a ledger's bytes drops, and what it leaves. `ledger_contract` tests both databases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from episode_records import restored
from ledger_contract import LARGE_BYTES, full, put_large
from tinkerscript.ledger import Ledger, SqliteLedger
from tinkerscript.ledger.rows import CheckpointRow, TrainedRow, Use
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.trainer_messages import resume_run


def checkpoint(step: int, *, undone: int = 0) -> CheckpointRow:
    return CheckpointRow(step=step, time=1.0, policy_version=step, train_seconds=1.0, undone=undone)


# Which can train

NEEDED = range(20, 24)
"""More than the limit."""


@pytest.mark.parametrize(
    ("checkpoints", "replay_lag", "dropped"),
    [([], 0, 0), ([2], 0, 0), ([2, 3], 0, 2), ([1, 2, 3], 1, 1), ([2, 4], 0, 2), ([2, 4], 3, 0)],
)
async def test_an_episode_keeps_its_bytes_while_it_may_train(
    ledger: SqliteLedger, checkpoints: list[int], replay_lag: int, dropped: int
) -> None:
    """Episode n trained in step n. A resumption may go back to the second newest checkpoint."""
    await put_large(ledger, *range(1, 6), step=lambda number: number)
    await put_large(ledger, *NEEDED, step=lambda number: 9)
    await ledger.commit([*map(checkpoint, checkpoints), checkpoint(9, undone=1)])
    await StorageLimit(ledger, 1, replay_lag=replay_lag).keep()
    assert await full(ledger) == [*range(dropped + 1, 6), *NEEDED]


async def test_what_is_still_needed_keeps_its_bytes_and_loses_them_later(ledger: SqliteLedger) -> None:
    await put_large(ledger, 1, 2, 3, 4, 5)
    await put_large(ledger, 6, consumed=0)
    again = TrainedRow(episode=2, step=4, outcome=Use.TRAINED)
    undone = TrainedRow(episode=3, step=8, outcome=Use.TRAINED, undone=1)
    await ledger.commit([again, undone, checkpoint(1), checkpoint(2)])
    storage = StorageLimit(ledger, 1)
    await storage.keep()
    assert await full(ledger) == [2, 5, 6]
    await put_large(ledger, 7, 8)
    await ledger.commit([checkpoint(5), checkpoint(6)])
    await storage.keep()
    assert await full(ledger) == [6, 7, 8], "the oldest that can go, also if newer ones went before"


# How much


async def test_nothing_is_dropped_up_to_the_limit_or_without_one(ledger: SqliteLedger) -> None:
    await put_large(ledger, 1, 2, 3)
    await ledger.commit([checkpoint(1), checkpoint(2)])
    storage = StorageLimit(ledger, 1)
    await storage.keep()
    left = 2**20 - 3 * LARGE_BYTES
    await put_large(ledger, 4, size=left)
    await storage.keep()
    assert await full(ledger) == [1, 2, 3, 4], "up to the limit"
    await put_large(ledger, *range(5, 9))
    await StorageLimit(ledger, 0).keep()
    assert len(await full(ledger)) == 8
    await asyncio.gather(storage.keep(), storage.keep())
    assert await full(ledger) == [6, 7, 8]


async def test_a_limit_that_cannot_be_kept_is_looked_at_again_after_a_while(ledger: SqliteLedger) -> None:
    storage = StorageLimit(ledger, 1)
    assert storage.is_reached, "nobody has counted yet"
    await put_large(ledger, 1, 2, 3, 4)
    await storage.keep()
    assert await full(ledger) == [1, 2, 3, 4], "there is no checkpoint"
    await ledger.commit([checkpoint(1), checkpoint(2)])
    assert not storage.is_reached
    await put_large(ledger, 5)
    assert storage.is_reached
    await storage.keep()
    assert await full(ledger) == [3, 4, 5]
    assert not storage.is_reached


async def test_what_is_there_counts_after_a_restart_too(ledger: SqliteLedger) -> None:
    await put_large(ledger, 1, 2, 3)
    await ledger.commit([checkpoint(1), checkpoint(2)])
    again = StorageLimit(ledger, 1)
    await again.keep()
    await put_large(ledger, 4)
    await again.keep()
    assert await full(ledger) == [2, 3, 4]


# With a book


async def trained_groups(ledger: Ledger, *, kept: int) -> Interchange:
    """The groups a and b, of two episodes each, trained in step 1. `kept`: of them, in the book."""
    server = await restored(ledger, time.monotonic, max_attempts=2, kept=kept)
    for number, group in enumerate("aabb", start=1):
        server.book.register(f"e{number}", "train", group, b"{}", step=1, position=0)
        claimed = server.book.claim("c", "train", 60.0)
        assert claimed is not None
        server.book.end(claimed.uuid, 1, reward=1.0, result=b'{"reward": 1.0}')
    await server.commit()
    for number in range(1, 5):
        server.book.consume(number)
    await server.commit()
    await put_large(ledger, *range(1, 5), with_episode=False)
    await ledger.commit([checkpoint(1), checkpoint(2)])
    return server


@pytest.mark.parametrize("kept", [1, 10])
async def test_a_resumption_does_not_use_an_emptied_episode_again(ledger: SqliteLedger, kept: int) -> None:
    server = await trained_groups(ledger, kept=kept)
    assert ("e1" in server.book) == (kept == 10)
    await StorageLimit(ledger, 1, empty=server.empty).keep()
    assert await full(ledger) == [2, 3, 4]
    again = await restored(ledger, time.monotonic, max_attempts=2, kept=10)
    assert [each.uuid for each in again.book if each.emptied] == ["e1"]
    history = await resume_run(again, ledger, [])  # Neither checkpoint is whole any more.
    assert history.step == 0
    assert [(each.episode_uuid, each.group_id) for each in history.planned] == [("e3", "b"), ("e4", "b")]
    assert [each.uuid for each in again.book if not each.consumed] == ["e3", "e4"]


@pytest.mark.parametrize("kept", [1, 10])
async def test_an_episode_that_a_resumption_took_keeps_its_bytes(ledger: SqliteLedger, kept: int) -> None:
    server = await trained_groups(ledger, kept=kept)

    async def empty(uuids: Sequence[str]) -> set[str]:
        await server.recall(["e1", "e2"])
        server.book.resume(0, 1, dict.fromkeys((1, 2), Use.TRAINED))
        return await server.empty(uuids)

    await StorageLimit(ledger, 1, empty=empty).keep()
    assert await full(ledger) == [1, 2, 3, 4]
    assert [each.uuid for each in server.book if each.emptied] == []
    await server.commit()
    await StorageLimit(ledger, 1, empty=server.empty).keep()
    assert await full(ledger) == [1, 2, 4], "the oldest that is not open"
