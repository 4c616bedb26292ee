"""What somebody new, with the package from a wheel, sees when something is wrong, waits or is stopped."""

from __future__ import annotations

import json
import socket
import time

import pytest

from command_line import Command
from newcomer import END_S, Shell, interrupted

pytestmark = [pytest.mark.timeout(500), pytest.mark.xdist_group("mistakes")]


def test_a_run_in_which_nothing_succeeds_says_why(shell: Shell) -> None:
    (shell.folder / "broken_agent.py").write_text(
        "def rollout(episode):\n    raise OSError('no such tool')\n"
    )
    reasons = {"unscored": "check that the task has a scorer", "agent": "OSError: no such tool"}
    commands: dict[str, Command] = {}
    for name in reasons:
        what = "workers.script=broken_agent.py" if name == "agent" else f"task.name=tasks.py@{name}"
        folder = f"--set=experiment_dir={name}"
        commands[name] = shell.start("train", "run.yaml", "--set", what, folder, output=f"{name}.txt")
    for name, reason in reasons.items():
        code, text = commands[name].wait(seconds=400), commands[name].text()
        assert code == 2, text
        assert "error: evaluation before: all 4 episodes that ended failed:" in text
        assert reason in text
        assert f"once the cause is fixed, resume with: tinkerscript train --resume {name}" in text
        assert "serve the model" not in text


@pytest.mark.long
def test_a_step_that_trains_nothing_says_why(shell: Shell) -> None:
    code, text = shell.run("train", "run.yaml", "--set=task.name=tasks.py@equal")
    assert code == 3, text
    assert "step 1 trained nothing: in each of the 2 groups all rewards are equal (all are 0.5)" in text


def test_waits_are_named_and_ctrl_c_ends_them(shell: Shell) -> None:
    began = time.monotonic()
    code, text = shell.run("status", "--server", "http://127.0.0.1:9")
    assert (code, time.monotonic() - began < 5) == (1, True), text
    assert "no interchange server answers at http://127.0.0.1:9" in text
    worker = shell.start("worker", "agent.py", "--server", "http://127.0.0.1:9")
    worker.until(lambda: "waiting for the server: " in worker.text(), seconds=10)
    _, seconds = interrupted(worker)
    assert seconds < 5
    with socket.socket() as silent:  # It accepts connections and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        service = ["--set=engine.backend=tinker", f"--set=engine.base_url={url}"]
        training = shell.start("train", "run.yaml", *service, TINKER_API_KEY="tml-x")
        training.until(lambda: f"waiting for the Tinker service ({url})" in training.text(), seconds=60)
        code, seconds = interrupted(training)
    assert (code, seconds < END_S) == (130, True), training.text()


@pytest.mark.long
def test_a_stopped_run_has_its_last_step(shell: Shell) -> None:
    long = ["--set=training.steps=500", "--set=training.checkpoint_every=100", "--set=evaluation.episodes=0"]
    training = shell.start("train", "run.yaml", *long)
    run = shell.folder / "runs" / "latest"
    metrics = run / "metrics.jsonl"
    training.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    code, seconds = interrupted(training)
    assert (code, seconds < END_S) == (130, True), training.text()
    folder = run.resolve()
    assert f"stopping; resume with: tinkerscript train --resume runs/{folder.name}" in training.text()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert saved == [f"step_{max(steps):04d}"]
    code, text = shell.run("train", "--resume", "runs/latest", f"--set=training.steps={max(steps) + 1}")
    assert (code, f"run folder         runs/{folder.name} " in text) == (0, True), text
    assert (run.resolve(), json.loads((run / "summary.json").read_text())["steps"]) == (
        folder,
        max(steps) + 1,
    )
