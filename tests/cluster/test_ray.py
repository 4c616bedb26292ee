"""`cluster.launcher: ray` as a user starts it: on clusters of several nodes, which come, go and die."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import VirtualCluster, left_of

from command_line import DEMO, ROOT, SHORT, Command, as_options, metrics_lines, named, start
from run_ledger import ask, check_books, with_result

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("rollout.py")
ALONE = (
    *("cluster.launcher=local", "cluster.address=''", "engine.devices=1"),
    *("inference.backend=trainer", "inference.launch={}"),
)
"""Settings of a run without a cluster or replicas."""

LONG_S = 400
"""For what takes seconds on an idle machine."""

TOKENS = {
    "TINKERSCRIPT_CLIENT_TOKEN": "a-token-that-nobody-may-see",
    "TINKERSCRIPT_ADMIN_TOKEN": "another-token-that-nobody-may-see",
}


def train(folder: Path, config: Path = DEMO, **settings: Any) -> Command:
    quick = {"evaluation.episodes": 0, "workers.script": SCRIPT, "cluster.launcher": "ray"}
    return tinkerscript(folder, "train", str(config), *as_options({**SHORT, **quick, **settings}))


def tinkerscript(folder: Path, *arguments: str) -> Command:
    command = ("-m", "tinkerscript", *arguments)
    return start(folder, *command, program=Path(sys.executable), env={**os.environ, **TOKENS})


def check_secrets(run: Path, rays: Path, commands: list[str]) -> None:
    """No token is on a command line, in a log of the run, or in one of Ray's."""
    logs = [*(run / "logs").iterdir(), *rays.iterdir()]
    texts = [*commands, *(path.read_text(errors="replace") for path in logs if path.is_file())]
    assert not [text for text in texts if any(token in text for token in TOKENS.values())]


def test_a_node_that_goes_in_the_middle_takes_no_episode_with_it(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    """Its worker waits for another node and goes on there."""
    run = tmp_path / "run"
    cluster.add(cpus=3)
    nodes = cluster.add(cpus=1), cluster.add(cpus=1)
    settings: dict[str, Any] = {"engine.devices": 2, "workers.count": 2, "training.steps": 1000}
    command = train(tmp_path, **{"cluster.address": cluster.address, **settings})
    command.until(lambda: {"0-0", "1-0"} <= names_of(run), seconds=LONG_S)
    commands = left_of(tmp_path, "tinkerscript", within_s=0)
    for process in ("tinkerscript worker", "tinkerscript rank", "tinkerscript server"):
        assert any(process in each for each in commands), process
    cluster.remove(nodes[0])
    command.until(lambda: re.search(r"waiting for 1 CPU: worker \d; Ray has", command.text()), seconds=LONG_S)
    cluster.add(cpus=1)
    command.until(lambda: {"0-1", "1-1"} & names_of(run), seconds=LONG_S)
    command.until(lambda: not ask(run, AFTER_A_LOSS), seconds=LONG_S)
    interrupted(command, tmp_path)
    text = " ".join(command.text().split())
    assert re.search(r"worker \d died \(The actor died because its node has died\)", text), text
    logs = [run / "logs" / f"worker-{number}.log" for number in (0, 1)]
    assert any("its node has died" in log.read_text() for log in logs)
    assert not ask(run, "SELECT uuid FROM episodes WHERE state = 'failed' AND failure != 'cancelled'")
    check_secrets(run, cluster.logs, commands)


AFTER_A_LOSS = (
    "SELECT uuid FROM episodes JOIN attempts ON episode = sequence "
    "WHERE attempts.failure IS NOT NULL AND state IN ('registered', 'claimed')"
)
"""Episodes that another worker has still to end, after one was lost with its node."""


def interrupted(command: Command, folder: Path) -> None:
    command.process.send_signal(signal.SIGINT)
    assert command.wait(seconds=LONG_S) == 130, command.text()
    assert not left_of(folder, "tinkerscript", within_s=60)


def names_of(run: Path) -> set[str]:
    """The workers that have ended an episode: number and incarnation of each."""
    ended = "SELECT client FROM attempts JOIN episodes ON sequence = episode WHERE state = 'ended'"
    return {client.split("-", 2)[2] for (client,) in ask(run, f"{ended} AND attempts.failure IS NULL")}


VLLM = ROOT / "examples" / "arithmetic_vllm.yaml"


@pytest.mark.long
def test_a_replica_whose_node_goes_starts_on_another_one(cluster: VirtualCluster, tmp_path: Path) -> None:
    """Its model calls are made again at the other replica. Interrupted, the run goes on without a cluster."""
    run = tmp_path / "run"
    cluster.add(cpus=3)
    nodes = cluster.add(cpus=2), cluster.add(cpus=2)
    settings: dict[str, Any] = {
        "inference.launch.cpus": 2,
        "training.steps": 1000,
        "training.checkpoint_every": 1,
    }
    command = train(tmp_path, VLLM, **{"cluster.address": cluster.address, **settings})
    command.until(lambda: len(with_result(run)) > 20, seconds=LONG_S)
    commands = left_of(tmp_path, "tinkerscript", within_s=0)
    assert sum("with_parent" not in each and "vllm.entrypoints" in each for each in commands) == 2, commands
    cluster.remove(nodes[0])
    lost = r"replica (\d) died \(The actor died because its node has died\)"
    command.until(lambda: re.search(lost, " ".join(command.text().split())), seconds=LONG_S)
    number = re.search(lost, " ".join(command.text().split()))[1]  # type: ignore[index]
    steps = len(metrics_lines(tmp_path))
    command.until(lambda: len(metrics_lines(tmp_path)) > steps, seconds=LONG_S)
    cluster.add(cpus=2)
    command.until(lambda: f"replica {number} samples again" in command.text(), seconds=LONG_S)
    interrupted(command, tmp_path)
    steps = len(metrics_lines(tmp_path)) + 1
    without = [*ALONE, f"training.steps={steps}"]
    again = tinkerscript(tmp_path, "train", "--resume", "run", *(f"--set={each}" for each in without))
    assert again.wait(seconds=LONG_S) == 0, again.text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["episodes_lost"] == 0
    assert summary["max_abs_dlogp"] < 1e-3
    check_books(run)
    check_secrets(run, cluster.logs, commands)


@pytest.mark.long
def test_a_run_whose_head_dies_ends_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    command = train(tmp_path, **{"training.steps": 1000})
    command.until(lambda: metrics_lines(tmp_path), seconds=LONG_S)
    (head,) = named(command.family(), "gcs_server")
    head.kill()
    assert command.wait(seconds=LONG_S) != 0
    text = " ".join(command.text().split())
    assert "the Ray cluster is lost" in text
    assert "resume with: tinkerscript train --resume run" in text
    assert not left_of(tmp_path, "", within_s=60)
