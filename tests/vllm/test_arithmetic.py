"""`examples/arithmetic_vllm.yaml` as a user starts it, while everything dies once: it learns all the same."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import ROOT, Command, as_options, named, start
from run_ledger import ask, check_books, standing_steps
from tinkerscript.processes.launcher import free_port

SETTINGS: dict[str, Any] = {"experiment_dir": "run", "training.checkpoint_every": 1}


def over_http(port: int) -> dict[str, Any]:
    """Replicas that get their adapters from the interchange server, as they do on other machines."""
    return {
        "interchange_server.interchange_server_port": port,
        "inference.launch.env.TINKERSCRIPT_ADAPTERS": f"http://127.0.0.1:{port}/adapters",
    }


def in_step(run: Path, step: int) -> bool:
    """Whether the run is in the middle of `step`, counted from 1, or beyond it."""
    done = len(standing_steps(run))
    ended = "SELECT count(*) FROM episodes WHERE state = 'ended' AND step = ?"
    return done >= step or (done == step - 1 and ask(run, ended, step) > [(20,)])


def replicas(command: Command) -> list[psutil.Process]:
    """Their outermost processes."""
    wrappers = named(command.family(), "tinkerscript.processes.with_parent")
    return [each for each in wrappers if each.parent() not in wrappers]


def check_proofs(run: Path) -> None:
    """Each version was proved by each replica that sampled from it, as often as it had to."""
    lines = [json.loads(line) for line in (run / "replicas.jsonl").read_text().splitlines()]
    verdicts: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        if line["version"] is None:
            assert line["verdict"] == "proved", "a canary"
        else:
            verdicts[line["version"]].add(line["verdict"])
            assert line["gap"] < 1e-3
    versions = {version for (version,) in ask(run, "SELECT policy_version FROM publications")}
    assert versions <= verdicts.keys()
    assert verdicts.pop(0) == {"unchanged"}, "a new adapter changes nothing"
    assert set().union(*verdicts.values()) == {"proved"}
    print("largest gap", max(line["gap"] for line in lines))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_learns_through_two_replicas_and_loses_nothing(tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    config = str(ROOT / "examples" / "arithmetic_vllm.yaml")
    command = start(tmp_path, "train", config, *as_options(SETTINGS | over_http(port)))
    # The trainer is killed in the middle of a step; its replicas end with it.
    command.until(lambda: in_step(run, 2), seconds=300)
    family = command.family()
    assert len(replicas(command)) == 2
    command.process.kill()
    command.process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [], [process.cmdline() for process in alive]
    command = start(tmp_path, "train", "--resume", "run")
    # Then a replica, in the middle of a step, with whatever it started.
    command.until(lambda: in_step(run, 4), seconds=300)
    victim = replicas(command)[0]
    for process in (*victim.children(recursive=True), victim):
        process.kill()
    # Then the server.
    command.until(lambda: in_step(run, 5), seconds=300)
    (server,) = named(command.family(), "tinkerscript server")
    server.send_signal(signal.SIGKILL)
    assert command.wait(seconds=400) == 0, command.text()
    text = command.text()
    assert re.search(r"replica \d died \(exit code -9\); its model calls go to other replicas", text)
    summary = json.loads((run / "summary.json").read_text())
    print(summary["eval_before"], "->", summary["eval_after"], "gap", summary["max_abs_dlogp"])
    assert summary["eval_before"] < 0.55
    assert summary["eval_after"] >= 0.85
    assert summary["episodes_lost"] == 0
    assert summary["max_abs_dlogp"] < 1e-3
    check_books(run, may_fail=True)
    check_proofs(run)
