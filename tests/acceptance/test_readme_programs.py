"""The README's programs, run as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from command_line import COMMAND, ROOT, start_training, summary

PROGRAM, AGENT = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_program_trains_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'before': " in done.stdout
    assert "'after': " in done.stdout
    assert summary(tmp_path)["train_episodes"] == 3 * 32 * 8


def test_the_agent_works_for_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    command = start_training(tmp_path, **{"workers.count": 0, "training.steps": 1, "evaluation.episodes": 0})
    server = tmp_path / "run" / "server.json"
    command.until(server.exists)
    env = {**os.environ, "TINKERSCRIPT_SERVER_URL": json.loads(server.read_text())["url"]}
    worker = subprocess.Popen([COMMAND, "worker", "agent.py", "--concurrency", "4"], cwd=tmp_path, env=env)
    try:
        assert command.wait() == 0, command.text()
    finally:
        worker.terminate()
        worker.wait(timeout=30)
    result = summary(tmp_path)
    assert (result["train_episodes"], result["episodes_failed"], result["episodes_lost"]) == (48, 0, 0)
