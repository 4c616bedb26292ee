"""A power cut or a copy can take the end of SQLite's log away: what is left is a beginning of the commits,
and each of them is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from run_ledger import ended_episode
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import EpisodeRow, EvaluationRow, TrainedRow, Use

COMMITS = 40


async def test_a_log_that_was_cut_leaves_whole_commits(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    ledger = SqliteLedger(path)
    for number in range(1, COMMITS + 1):
        evaluation = EvaluationRow(
            label=f"step-{number}",
            step=number,
            time=0.0,
            policy_version=number,
            score=1.0,
            accepted=1,
            failed=0,
        )
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
