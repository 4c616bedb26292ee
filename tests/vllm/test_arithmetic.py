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
from interchange_helpers import stored_outcomes
from tinkerscript.processes.launcher import free_port
from tinkerscript.train.journal import EpisodeRegistered, PolicyPublished, StepConsumed, read_journal
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

CONSUMED, ACCEPTED = (f'{{"type":"{kind}"'.encode() for kind in ("StepConsumed", "EpisodeAccepted"))

SETTINGS: dict[str, Any] = {"experiment_dir": "run", "training.checkpoint_every": 1}


def over_http(port: int) -> dict[str, Any]:
    """Replicas that get their adapters from the interchange server, as they do on other machines."""
    return {
        "interchange_server.interchange_server_port": port,
        "inference.launch.env.TINKERSCRIPT_ADAPTERS": f"http://127.0.0.1:{port}/adapters",
    }


def in_step(run: Path, step: int) -> bool:
    """Whether the run is in the middle of `step`, counted from 1, or beyond it."""
    path = run / "journal.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    consumed = [number for number, line in enumerate(lines) if line.startswith(CONSUMED)]
    if len(consumed) >= step:
        return True
    since = lines[consumed[-1] :] if consumed else lines
    return len(consumed) == step - 1 and sum(line.startswith(ACCEPTED) for line in since) > 20


def replicas(command: Command) -> list[psutil.Process]:
    """Their outermost processes."""
    wrappers = named(command.family(), "tinkerscript.processes.with_parent")
    return [each for each in wrappers if each.parent() not in wrappers]


def check_books(run: Path) -> None:
    journal = read_journal(run / "journal.jsonl")
    registered = [e.episode_uuid for e in journal if isinstance(e, EpisodeRegistered)]
    ended = [e.episode_uuid for e in journal if isinstance(e, EpisodeAccepted | EpisodeFailed)]
    assert sorted(ended) == sorted(registered)
    outcomes = stored_outcomes(run / "server.sqlite")
    assert all(outcomes[uuid] in ("accepted", "failed") for uuid in registered)
    trained = [uuid for e in journal if isinstance(e, StepConsumed) for uuid in e.episode_uuids]
    assert len(set(trained)) == len(trained)
    published = {e.policy_version for e in journal if isinstance(e, PolicyPublished)}
    calls = [call for e in journal if isinstance(e, EpisodeAccepted) for call in e.calls]
    assert {call.policy_version for call in calls} <= published


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
    versions = {
        e.policy_version for e in read_journal(run / "journal.jsonl") if isinstance(e, PolicyPublished)
    }
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
    check_books(run)
    check_proofs(run)
