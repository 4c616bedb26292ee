"""The demo, with hostile clients among its workers: it finishes, and learns as it does without them."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import processes
import pytest
import yaml
from checker import claims_of, find_hostile_faults
from conductor import PROCESSES, hostile_accounts, hostile_clients, hostile_tokens, hostilities
from evidence import HOSTILE, query_file, read_ledger, read_lines
from hostile import WAYS
from processes import Victim

from tinkerscript.files import LEDGER_FILE

DEMO = Path(__file__).parents[2] / "examples" / "arithmetic.yaml"
HELD_OUT = 0.9
START_S = 300.0
"""The trainer loads torch first, which takes its time on a busy machine."""

MAX_REWARD = 1.0
"""What the demo's scorer can give."""


@pytest.mark.timeout(900)
def test_the_demo_learns_among_hostile_clients(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    config = yaml.safe_load(DEMO.read_text())
    config["experiment_dir"] = str(run_dir)
    config["task"]["name"] = str(DEMO.parent / config["task"]["name"])
    config["interchange_server"] = {
        "interchange_server_port": 0,
        "clients": hostile_accounts(),
        "max_attempts": 20,
        "max_claim_s": 10.0,
        "max_reward": MAX_REWARD,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        *processes.FEW_FILES,
        sys.executable,
        "-m",
        "tinkerscript",
        "train",
        str(tmp_path / "config.yaml"),
    ]
    trainer = Victim("trainer", command, tmp_path / "trainer.log", hostile_tokens())
    victims = [trainer]
    with processes.ended_at_last(victims):
        trainer.start()
        processes.until(lambda: _serves(run_dir, trainer), "the server's start", seconds=START_S)
        victims += hostile_clients(run_dir, PROCESSES, seed=1, max_reward=MAX_REWARD)
        for hostile in victims[1:]:
            hostile.start()
        assert trainer.process is not None
        code = trainer.process.wait()
        for hostile in victims[1:]:
            hostile.check()
    assert code == 0, trainer.log.read_text()[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = read_ledger(partial(query_file, run_dir / LEDGER_FILE))
    accepted = [line for line in ledger.episodes if line["state"] == "ended"]
    done = read_lines(run_dir / HOSTILE)
    theirs = claims_of(done)
    honest = [line for line in accepted if (line["episode"], line["attempt"]) not in theirs]
    with capfd.disabled():
        print(
            f"\nheld-out score {summary['eval_before']:.3f} -> {summary['eval_after']:.3f} in "
            f"{summary['train_seconds']:.0f} s; {summary['episodes_retried']} attempts and "
            f"{summary['episodes_failed']} episodes failed, {summary['episodes_lost']} lost; "
            f"{len(accepted) - len(honest)} of {len(accepted)} results are hostile clients' own"
        )
        print(hostilities(run_dir))
    faults = find_hostile_faults(done, accepted)
    assert not faults, "\n".join(faults[:20])
    # What a hostile client asks the model, it marks.
    assert not [line for line in honest for call in line["calls"] if "turn 0]" in call["messages"]]
    assert {line["who"] for line in done} == set(WAYS)
    assert summary["episodes_lost"] == 0
    assert summary["eval_after"] >= HELD_OUT


def _serves(run_dir: Path, trainer: Victim) -> bool:
    trainer.check()
    return (run_dir / "server.json").exists()
