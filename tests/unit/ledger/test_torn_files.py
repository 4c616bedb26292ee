"""A power cut or a copy can take the end of SQLite's log away: what is left is a beginning of the commits,
and each of them is whole. A copy with pages of two moments is refused."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ledger_contract import made
from run_ledger import ended_episode
from tinkerscript.errors import StoreError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import EpisodeRow, EvaluationRow, StepRow, TrainedRow, Use

COMMITS = 40


async def test_a_log_that_was_cut_leaves_whole_commits(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    ledger = SqliteLedger(path)
    for number in range(1, COMMITS + 1):
        evaluation = made(EvaluationRow, number)
        trained = TrainedRow(episode=number, step=number, outcome=Use.EVALUATED)
        await ledger.commit([ended_episode(number), evaluation, trained])
    log = Path(f"{path}-wal")
    size = log.stat().st_size
    found = list[int]()
    for place, length in enumerate(range(0, size + 1, max(1, size // 37))):
        copy = tmp_path / str(place) / LEDGER_FILE
        copy.parent.mkdir()
        shutil.copy(path, copy)
        Path(f"{copy}-wal").write_bytes(log.read_bytes()[:length])
        found.append(await _whole_commits(copy))
    await ledger.close()
    assert found == sorted(found)
    assert found[-1] > COMMITS // 2 > found[0]


async def _whole_commits(path: Path) -> int:
    ledger = SqliteLedger(path)
    try:
        numbers = {each.step for each in await ledger.rows(EvaluationRow)}
        assert {each.episode for each in await ledger.rows(TrainedRow)} == numbers
        assert {each.sequence for each in await ledger.rows(EpisodeRow)} == numbers
        assert numbers == set(range(1, len(numbers) + 1))
    finally:
        await ledger.close()
    return len(numbers)


async def test_a_copy_with_pages_of_two_moments_is_refused(tmp_path: Path) -> None:
    path, copy = tmp_path / LEDGER_FILE, tmp_path / "copy" / LEDGER_FILE
    copy.parent.mkdir()
    ledger = SqliteLedger(path)

    async def steps(first: int, last: int) -> None:
        for step in range(first, last):
            episodes = [ended_episode(number, step=step) for number in range(50 * step, 50 * step + 50)]
            await ledger.commit([StepRow(step=step, time=0.0, policy_version=step), *episodes])

    await steps(0, 10)
    shutil.copy(path, copy)
    await steps(10, 20)  # Each step moves the log into the file, and the next one begins it anew.
    shutil.copy(f"{path}-wal", f"{copy}-wal")
    await ledger.close()
    with pytest.raises(StoreError, match="copied while the run wrote to it: copy the ledger of a live run"):
        SqliteLedger(copy)


async def test_a_row_of_an_episode_that_a_copy_has_not_is_found_once(tmp_path: Path) -> None:
    """Looking takes time, so only a copy is looked at, when it is first opened."""
    path, copy = tmp_path / LEDGER_FILE, tmp_path / "copy" / LEDGER_FILE
    copy.parent.mkdir()
    ledger = SqliteLedger(path)
    await ledger.commit([ended_episode(1), TrainedRow(episode=1, step=1, outcome=Use.TRAINED)])
    await ledger.close()
    shutil.copy(path, copy)
    await SqliteLedger(copy).close()
    for each in (path, copy):
        with closing(sqlite3.connect(each)) as connection:
            connection.execute("DELETE FROM episodes")
            connection.commit()
        await SqliteLedger(each).close()
    shutil.copy(path, tmp_path / "other.sqlite")
    with pytest.raises(
        StoreError, match=r"a row of trained refers to a row that does not exist\. It is damaged"
    ):
        SqliteLedger(tmp_path / "other.sqlite")
