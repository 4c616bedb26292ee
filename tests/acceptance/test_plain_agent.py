"""The second way in: a plain script in an environment that has the client and `openai`, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from command_line import ROOT, start_training, summary


def test_a_bare_install_contributes_episodes(tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "bare")
    heavy = "('torch', 'fastapi', 'zmq', 'numpy')"
    found = f"import importlib.util as u; print([n for n in {heavy} if u.find_spec(n)])"
    assert subprocess.check_output([python, "-c", found], text=True).strip() == "[]"
    command = start_training(tmp_path, **{"workers.count": 0, "training.steps": 1, "evaluation.episodes": 0})
    server = tmp_path / "run" / "server.json"
    command.until(server.exists)
    env = {**os.environ, "TINKERSCRIPT_SERVER_URL": json.loads(server.read_text())["url"]}
    agent = subprocess.Popen([python, str(ROOT / "examples" / "plain_agent.py")], env=env)
    try:
        assert command.wait() == 0, command.text()
    finally:
        agent.kill()
        agent.wait()
    result = summary(tmp_path)
    assert (result["train_episodes"], result["episodes_lost"]) == (48, 0)
    assert result["max_abs_dlogp"] <= 1e-4


def bare_environment(folder: Path) -> Path:
    """A virtual environment with the bare install plus `openai`; its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", ROOT, "openai"], check=True, timeout=300)
    assert sys.prefix not in str(python)
    return python
