"""A whole run over the network: real server, real worker, the trainer's books against the server's."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from interchange_helpers import stored_outcomes
from tinkerscript.config import RunConfig
from tinkerscript.testing import QuietReporter
from tinkerscript.train.journal import EpisodeAccepted, Journal, lost_episodes, read_journal
from tinkerscript.train.run import run_training

ROOT = Path(__file__).parents[2]


async def test_both_books_agree_and_a_missing_row_is_one_lost_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(
        {
            "experiment_dir": "run",
            "interchange_server": {"interchange_server_port": 0, "interchange_method": "tcp"},
            "task": {
                "name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
                "train_args": {"split": "train"},
                "eval_args": {"split": "test"},
            },
            "training": {"steps": 2, "groups_per_step": 4, "group_size": 3},
            "evaluation": {"episodes": 6},
            "workers": {"count": 1, "concurrency": 8},
        }
    )
    folder = await run_training(config, QuietReporter())
    summary = json.loads((folder.path / "summary.json").read_text())
    episodes = 2 * 4 * 3 + 2 * 6
    assert summary["train_episodes"] == 2 * 4 * 3
    assert summary["episodes_accepted"] == summary["server_results_accepted"] == episodes
    assert (summary["episodes_lost"], summary["sequences_per_episode"]) == (0, 1.0)
    assert summary["max_abs_dlogp"] <= 1e-4

    accepted = [e for e in read_journal(folder.path / "journal.jsonl") if isinstance(e, EpisodeAccepted)]
    assert {call.policy_version for episode in accepted for call in episode.calls} == {0, 1, 2}
    assert all(json.loads(call.reply)["role"] == "assistant" for e in accepted for call in e.calls)

    with Journal(tmp_path / "again.jsonl") as journal:
        journal.write(read_journal(folder.path / "journal.jsonl"))
        database = folder.path / "server.sqlite"
        assert lost_episodes(journal, stored_outcomes(database)) == []
        removed = accepted[3].episode_uuid
        with sqlite3.connect(database) as connection:
            connection.execute("DELETE FROM episodes WHERE uuid = ?", (removed,))
        connection.close()
        assert lost_episodes(journal, stored_outcomes(database)) == [removed]
