"""The pod of examples/cluster/kubernetes, whose trainer dies and starts again: its commands, here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import DEMO, ROOT, SHORT, Command, metrics_lines, start
from run_ledger import check_books
from tinkerscript.processes.launcher import free_port

MANIFEST = ROOT / "examples" / "cluster" / "kubernetes" / "run.yaml"
CONTAINERS = {
    container["name"]: container
    for document in yaml.safe_load_all(MANIFEST.read_text())
    if document["kind"] == "Job"
    for pod in [document["spec"]["template"]["spec"]]
    for container in [*pod["initContainers"], *pod["containers"]]
}
STEPS = 6


def words(container: str, folder: Path) -> list[str]:
    """A container's command with its volumes in `folder`, and without the replicas of the example."""
    kept = [word for word in CONTAINERS[container]["command"] if not word.startswith("--set=inference")]
    mounts = {"/runs/gsm8k": folder / "run", "/config/run.yaml": folder / "run.yaml"}
    for path, here in mounts.items():
        kept = [word.replace(path, str(here)) for word in kept]
    return kept


def begin(container: str, folder: Path, *, output: str = "") -> Command:
    program, *arguments = words(container, folder)
    assert program == "tinkerscript"
    return start(folder, *arguments, output=f"{output or container}.txt")


def prepare(folder: Path) -> None:
    """What runs first, each time that the pod starts."""
    subprocess.run(words("folder", folder), check=True, timeout=60)


def config_of(port: int) -> dict[str, Any]:
    config = yaml.safe_load(DEMO.read_text())
    settings = {
        **SHORT,
        "interchange_server.interchange_server_port": port,
        "training.steps": STEPS,
        "training.checkpoint_every": 1,
        "evaluation.episodes": 0,
    }
    for name, value in settings.items():
        *sections, key = name.split(".")
        section = config
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = value
    return {**config, "experiment_dir": "/runs/gsm8k"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_trainer_that_starts_again_goes_on_with_the_run(tmp_path: Path) -> None:
    """It is killed in the middle of a step; the server and the workers stay."""
    run, port = tmp_path / "run", free_port()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_of(port)))
    prepare(tmp_path)
    server = begin("server", tmp_path)
    server.until((run / "server.json").exists)
    args = ("--task-args", '{"split": "train"}', "--eval-args", '{"split": "test"}')
    task = ("--task", SHORT["task.name"], *args)
    worker = start(tmp_path, "worker", *task, "--server", f"http://127.0.0.1:{port}", output="worker.txt")
    trainer = begin("trainer", tmp_path)
    trainer.until(lambda: len(metrics_lines(tmp_path)) >= 2, seconds=200)
    trainer.process.kill()
    trainer.process.wait()
    done = len(metrics_lines(tmp_path))
    assert done < STEPS
    prepare(tmp_path)
    again = begin("trainer", tmp_path, output="again")
    assert again.wait(seconds=200) == 0, again.text()
    assert [line["step"] for line in metrics_lines(tmp_path)] == list(range(1, STEPS + 1))
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["episodes_lost"], summary["episodes_failed"]) == (0, 0)
    assert worker.wait(seconds=60) == 0, "the run's end reaches it"
    server.process.terminate()
    assert server.wait(seconds=60) == 0, server.text()
    check_books(run)
