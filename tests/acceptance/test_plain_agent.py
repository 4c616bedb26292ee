"""The second way in: scripts of one's own, one of them where only the client and `openai` are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

from command_line import ROOT, start_training, summary
from tinkerscript.train.journal import EpisodeAccepted, StepConsumed, read_journal

_, AGENT = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_a_bare_install_and_the_readmes_agent_contribute_episodes(tmp_path: Path) -> None:
    """The bare install runs a program of its own for the first step, and its worker for the second."""
    python = bare_environment(tmp_path / "bare")
    heavy = "('torch', 'fastapi', 'zmq', 'numpy')"
    found = f"import importlib.util as u; print([n for n in {heavy} if u.find_spec(n)])"
    assert subprocess.check_output([python, "-c", found], text=True).strip() == "[]"
    (tmp_path / "agent.py").write_text(AGENT)
    command = start_training(tmp_path, **{"workers.count": 0, "training.steps": 2, "evaluation.episodes": 0})
    server = tmp_path / "run" / "server.json"
    command.until(server.exists)
    env = {**os.environ, "TINKERSCRIPT_SERVER_URL": json.loads(server.read_text())["url"]}
    plain = subprocess.Popen(
        [python, str(ROOT / "examples" / "plain_agent.py")],
        env=env,
        # Tests that run in the background of a shell ignore SIGINT, and so would the agent.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    worker = None
    try:
        command.until(lambda: any(isinstance(e, StepConsumed) for e in journal(tmp_path)))
        plain.send_signal(signal.SIGINT)  # It gives back the episode that it is at.
        assert plain.wait(timeout=30) == 0
        worker = subprocess.Popen(
            [python.parent / "tinkerscript", "worker", "agent.py", "--concurrency", "4"],
            cwd=tmp_path,
            env={name: value for name, value in env.items() if name != "PYTHONPATH"},
        )
        assert command.wait() == 0, command.text()
    finally:
        for process in filter(None, (plain, worker)):
            process.kill()
            process.wait()
    result = summary(tmp_path)
    assert (result["train_episodes"], result["episodes_lost"]) == (2 * 48, 0)
    assert result["max_abs_dlogp"] <= 1e-4
    clients = {event.client_uuid for event in journal(tmp_path) if isinstance(event, EpisodeAccepted)}
    assert len(clients) == 2


def journal(tmp_path: Path) -> list[object]:
    return list(read_journal(tmp_path / "run" / "journal.jsonl"))


def bare_environment(folder: Path) -> Path:
    """A virtual environment with the bare install plus `openai`; its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    install = [*pip, "install", "--quiet", "--no-compile"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", ROOT, "openai"], check=True, timeout=300)
    assert sys.prefix not in str(python)
    return python
