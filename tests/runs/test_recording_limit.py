"""A run whose episodes leave more than `recording_limit_mb` lets the oldest lose theirs, and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plain_sums import SUMS
from run_ledger import ask, check_books, standing_steps
from short_runs import short_run
from tinkerscript.config import RunConfig
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.storage import LARGE
from tinkerscript.page.episode_view import episode_view
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

LIMIT = 2**20
TRANSCRIPT = 24 * 1024

AGENT = f"""
import os
from urllib.request import Request, urlopen


def rollout(episode):
    base, headers = episode.openai_base_url, {{"Authorization": f"Bearer {{episode.openai_api_key}}"}}
    call = b'{{"model": "policy", "max_tokens": 4, "messages": [{{"role": "user", "content": "1+1?"}}]}}'
    in_json = headers | {{"Content-Type": "application/json"}}
    urlopen(Request(f"{{base}}/chat/completions", call, in_json)).close()
    transcripts = f"{{base.removesuffix('/v1')}}/record_transcript"
    urlopen(Request(transcripts, os.urandom({TRANSCRIPT}), headers)).close()
    return float(os.urandom(1)[0] % 2)
"""


def config(folder: Path, *, steps: int) -> RunConfig:
    training: dict[str, Any] = {"steps": steps, "groups_per_step": 2, "group_size": 4, "max_policy_lag": 1}
    return short_run(
        folder / "run",
        task=SUMS,
        recording_limit_mb=LIMIT // 2**20,
        training=training | {"checkpoint_every": 1},
        workers={"script": str(folder / "agent.py")},
    )


async def test_the_oldest_episodes_lose_what_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    for steps in (10, 12):  # The second run resumes the first.
        path = tmp_path / "run" if steps > 10 else None
        run = (await run_training(config(tmp_path, steps=steps), QuietReporter(), path=path)).path
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["steps"], summary["episodes_lost"]) == (steps, 0)
        sizes = [ask(run, f"SELECT sum(length({column})) FROM {table}") for table, column in LARGE.items()]
        assert LIMIT / 2 < sum(size for ((size,),) in sizes) < LIMIT + 8 * TRANSCRIPT, "at most a step more"
        emptied = ask(run, "SELECT emptied FROM episodes ORDER BY end_number")
        assert emptied == sorted(emptied, reverse=True), "the oldest"
        assert 0 < sum(each for (each,) in emptied) < len(emptied)
        kept = sum(len(group.episodes) for group in recorded_groups(run))
        assert kept == len(emptied) - sum(each for (each,) in emptied)
    check_books(run)
    assert standing_steps(run) == list(range(1, 13))
    *_, newest = uuids = [uuid for (uuid,) in ask(run, "SELECT uuid FROM episodes ORDER BY end_number")]
    views = [episode_view("run", LedgerReader(run), uuid) for uuid in (uuids[0], newest)]
    assert [(view.recorded, len(view.turns), view.transcripts) for view in views] == [
        (False, 0, []),
        (True, 1, [1]),
    ]
    assert [view.line.calls for view in views] == [1, 1], "how many there were"
