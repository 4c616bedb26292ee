"""Episodes that only the ledger has: a server answers for them as for those in its book."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import pytest

from episode_records import restored
from rollout_helpers import make_call
from tinkerscript.errors import ConflictError, NotTheOwnerError, UnknownEpisodeError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.history import Tally, tally
from tinkerscript.ledger.rows import (
    CheckpointRow,
    EpisodeRow,
    PublicationRow,
    ResumptionRow,
    StepRow,
    TrainedRow,
    Use,
)
from tinkerscript.protocol import Failure
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.trainer_messages import resume_run
from tinkerscript.trainer_link.messages import NewEpisode

KEPT = 3


class Server(NamedTuple):
    interchange: Interchange
    ledger: SqliteLedger

    @property
    def book(self) -> EpisodeBook:
        return self.interchange.book

    async def train(
        self,
        *numbers: int,
        failing: tuple[int, ...] = (),
        cancelled: tuple[int, ...] = (),
        outcome: str = Use.TRAINED,
    ) -> None:
        """These episodes end, fail, or are cancelled, and their step uses them."""
        for number in numbers:
            uuid = f"e{number}"
            self.interchange.register(new(number))
            if number in cancelled:
                self.book.cancel(uuid, "enough")
            elif self.book.claim("c", "train", 60.0) and number in failing:
                self.book.abort(uuid, 1, Failure(kind="boom"))
            else:
                self.book.end(uuid, 1, reward=1.0, result=b"{}")
            await self.interchange.commit()
            sequence = self.book.get(uuid).sequence
            self.ledger.put(TrainedRow(episode=sequence, step=step_of(number), outcome=outcome))
            self.book.consume(sequence)
        await self.interchange.commit()


def step_of(number: int) -> int:
    return 1 + number // 4


def new(number: int, **more: Any) -> NewEpisode:
    given: dict[str, Any] = {"group_id": f"g{number // 2}", "payload": b"{}", "position": number // 2}
    return NewEpisode(episode_uuid=f"e{number}", episode_type="train", step=step_of(number), **given | more)


@asynccontextmanager
async def server(folder: Path) -> AsyncGenerator[Server]:
    ledger = SqliteLedger(folder / LEDGER_FILE)
    made = await restored(ledger, time.monotonic, max_attempts=1, kept=KEPT)
    yield Server(made, ledger)
    await made.commit()
    await ledger.close()


async def test_the_book_holds_what_was_consumed_last_and_every_failure(tmp_path: Path) -> None:
    async with server(tmp_path) as run:
        await run.train(*range(16), failing=(1,), cancelled=(2,))
        run.interchange.register(new(16))
        counts = run.book.counts.by_pool(), run.book.counts.by_type(), run.book.counts.failures()
        assert len(run.book) < 16
        assert "e15" in run.book
        assert [each.uuid for each in run.book.latest_failed(9)] == ["e1"], "an operator has to see it"
    async with server(tmp_path) as again:
        assert {each.uuid for each in again.book} == {"e1", "e13", "e14", "e15", "e16"}
        found = again.book.counts
        assert (found.by_pool(), found.by_type(), found.failures()) == counts
        accepted = {"train_accepted": 14, "planned_accepted": 14}
        assert await tally(again.ledger) == Tally(**accepted, failed=1, cancelled=1, lost=1)
        again.interchange.register(new(17))
        assert again.book.get("e17").sequence == 18


async def test_a_late_request_finds_its_episode(tmp_path: Path) -> None:
    async with server(tmp_path) as run:
        await run.train(*range(16))
    async with server(tmp_path) as again:
        with pytest.raises(UnknownEpisodeError):
            again.book.get("e0")
        await again.interchange.recall(["e0", "e1", "nobody's", "no text: \ud800", "e15"])
        assert again.book.end("e0", 1, reward=1.0, result=b"{}").status == "accepted", "the same again"
        with pytest.raises(ConflictError, match="already ended with another result"):
            again.book.end("e0", 1, reward=0.0, result=b"[]")
        with pytest.raises(NotTheOwnerError, match="the episode has ended with its result"):
            again.book.held("e1", 1)
        again.interchange.register(new(0))
        assert again.book.get("e0").status == "accepted", "known with the same content"
        with pytest.raises(ConflictError, match="already registered with other content"):
            again.interchange.register(new(1, payload=b'{"other": 1}'))
        assert await again.ledger.read("SELECT count(*) FROM {s}episodes") == [(16,)]


async def test_a_resumption_reaches_what_is_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint of step 1: step 2 trains on its episodes again, and those of later steps are
    undone. It is one transaction: after half of one, the next resumption would not know what was used."""
    async with server(tmp_path) as run:
        await run.train(*range(16))
        steps = [StepRow(step=step, time=0.0, policy_version=step) for step in range(1, 5)]
        saved = CheckpointRow(step=1, time=0.0, policy_version=1, train_seconds=1.0)
        await run.ledger.commit([*steps, saved])
    async with server(tmp_path) as again:
        write = AsyncMock(wraps=again.ledger.write)
        monkeypatch.setattr(again.ledger, "write", write)
        history = await resume_run(again.interchange, again.ledger, [1])
        assert write.await_count == 1
        assert write.await_args_list[0].args[0].rows.keys() >= {ResumptionRow, EpisodeRow}
        assert [each.episode_uuid for each in history.planned] == ["e4", "e5", "e6", "e7"]
        assert (history.planned_groups, history.next_position, history.open_until) == (2, 4, 8)
    async with server(tmp_path) as third:
        undone = "SELECT uuid FROM {s}episodes WHERE undone = 1 ORDER BY sequence"
        assert await third.ledger.read(undone) == [(f"e{number}",) for number in range(8, 16)]
        assert sorted(each.uuid for each in third.book.open_ends.values()) == ["e4", "e5", "e6", "e7"]


@pytest.mark.parametrize(("plan_lag", "again"), [(0, []), (2, [1])])
async def test_a_resumption_goes_on_with_what_only_weights_that_stand_have_sampled(
    tmp_path: Path, plan_lag: int, again: list[int]
) -> None:
    """From the checkpoint of step 1. The weights of step 2 sampled a part of the group at position 1; those
    at 2 and 3 trained in step 2 or are in flight."""
    async with server(tmp_path) as run:
        versions = [PublicationRow(policy_version=n, step=n, time=0.0) for n in range(3)]
        steps = [StepRow(step=step, time=0.0, policy_version=step) for step in (1, 2)]
        saved = CheckpointRow(step=1, time=0.0, policy_version=1, train_seconds=1.0)
        await run.ledger.commit([*versions, *steps, saved])
        await run.train(0, 1, 4, 5)
        for number in (2, 3, 6, 7, 8, 9):
            run.interchange.register(new(number))
        sampled = {"e2": (1, 2), "e6": (1, 1)}
        for uuid, (first, last) in sampled.items():
            claimed = run.book.claim("c", "train", 60.0)
            assert claimed is not None
            call = make_call(None, [1], [2], policy_version=first, policy_version_end=last)
            while claimed.uuid != uuid:  # Its sibling is claimed, and has no call yet.
                claimed = run.book.claim("c", "train", 60.0)
                assert claimed is not None
            await run.interchange.commit()
            run.ledger.put_call(claimed.sequence, 1, call)
        history = await resume_run(run.interchange, run.ledger, [1], plan_lag=plan_lag)
        planned = [(each.episode_uuid, each.step) for each in history.planned]
        assert planned == [("e4", 2), ("e5", 2), ("e6", 2), ("e7", 2)]
        assert (history.next_position, history.again) == (4, again)
        assert {run.book.get(f"e{number}").last_failure for number in (2, 3, 8, 9)} == {"cancelled"}
        assert [each.uuid for each in run.book.open_ends.values()] == ["e4", "e5"]
        later = await resume_run(run.interchange, run.ledger, [1], plan_lag=plan_lag)
        assert (later.planned, later.again) == (history.planned, again), "the sample is still to be asked"
