"""A whole run over the network: real server, real worker, the trainer's books against the server's."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from interchange_helpers import stored_outcomes
from tinkerscript.client import Episode, TinkerScriptClient, run
from tinkerscript.config import RunConfig
from tinkerscript.errors import RequestRefusedError
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


async def test_a_broken_client_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails from the first second on, while the run's own worker still loads its task."""
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(
        {
            "experiment_dir": "run",
            "interchange_server": {"interchange_server_port": 0},
            "task": {"name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic"},
            "training": {"steps": 2, "groups_per_step": 4, "group_size": 3},
            "evaluation": {"episodes": 40},
            "workers": {"count": 1, "concurrency": 4},
        }
    )
    refusals: list[str] = []

    def broken(episode: Episode) -> float:
        raise OSError("no space left on the device")

    def fail() -> None:
        path = tmp_path / "run" / "server.json"
        while not path.exists():
            time.sleep(0.05)
        client = TinkerScriptClient(json.loads(path.read_text())["url"], client_uuid="broken", timeout_s=5)
        with client, pytest.raises(RequestRefusedError) as refused:
            run(broken, client=client, concurrency=4)
        refusals.append(str(refused.value))

    failing = threading.Thread(target=fail)
    failing.start()
    reporter = QuietReporter()
    folder = await run_training(config, reporter)
    failing.join(timeout=30)
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_lost"]) == (2, 0)
    assert summary["train_episodes"] == 2 * 4 * 3
    (note,) = (note for note in reporter.notes if "gets no more episodes" in note)
    assert note.startswith("client 'broken' gets no more episodes for now: its last ")
    assert note.endswith(
        "attempts failed while others succeeded: task_error: OSError: no space left on the device"
    )
    assert ["is in quarantine" in refusal for refusal in refusals] == [True]
