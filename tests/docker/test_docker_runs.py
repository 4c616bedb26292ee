"""Runs of `tinkerscript train` whose episodes have containers, and what is killed in the middle of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import container_tasks
import pytest

from command_line import Command, as_options, named, start, summary
from engine import Engine, docker
from run_ledger import results

pytestmark = pytest.mark.timeout(300)

EPISODES = 4


def train(folder: Path, gate: Path) -> Command:
    settings = {
        "task.name": f"{container_tasks.__file__}@contained",
        "experiment_dir": "run",
        "interchange_server.interchange_server_port": 0,
        "engine.model": "tiny",
        "sampling.max_tokens": 16,
        "training.steps": 1,
        "training.groups_per_step": 2,
        "training.group_size": EPISODES // 2,
        "evaluation.episodes": 0,
        "workers.count": 1,
        "workers.concurrency": EPISODES,
    }
    (folder / "run.yaml").write_text("{}")
    variables = os.environ | {"GATE": str(gate)}
    return start(folder, "train", "run.yaml", *as_options(settings), env=variables)


def check(folder: Path, command: Command) -> None:
    """The run's results: every one is what two containers said of themselves."""
    assert command.wait() == 0, command.text()
    accepted = results(folder / "run")
    assert len(accepted) == EPISODES
    for episode in accepted:
        (verdict,) = episode.metadata["explanations"].values()
        assert verdict["explanation"].split("\n") == [*container_tasks.EXPECTED, "2 machines"]
        assert episode.reward == float(verdict["answer"])


def all_wait(gate: Path) -> bool:
    return len([*gate.parent.glob(f"{gate.name}-*")]) == EPISODES


def test_a_killed_worker_leaves_no_container_and_another_runs_its_episodes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = train(tmp_path, gate)
    command.until(lambda: all_wait(gate))
    lost = set(docker("ps", "--quiet"))
    assert len(lost) >= 2 * EPISODES
    named(command.family(), "tinkerscript worker")[0].kill()
    command.until(lambda: not lost & set(docker("ps", "--all", "--quiet")))
    gate.touch()
    check(tmp_path, command)
    assert "worker 0 died (signal 9); starting it again" in command.text()
    assert (summary(tmp_path)["episodes_lost"], summary(tmp_path)["episodes_failed"]) == (0, 0)


def test_an_engine_that_dies_costs_attempts_and_no_reward(
    tmp_path: Path, docker_engine: Engine | None
) -> None:
    if docker_engine is None:
        pytest.skip("the engine that runs here is not ours to kill")
    gate = tmp_path / "gate"
    command = train(tmp_path, gate)
    command.until(lambda: all_wait(gate))
    docker_engine.kill()
    try:
        gate.touch()
        log = tmp_path / "run" / "logs" / "worker-0.log"
        lost = re.compile(r"WARNING .* episode \w+ failed: .*container was lost.* the Docker daemon")
        command.until(lambda: len(lost.findall(log.read_text())) == EPISODES)
    finally:
        docker_engine.start()
    check(tmp_path, command)
    assert summary(tmp_path)["episodes_retried"] == EPISODES
