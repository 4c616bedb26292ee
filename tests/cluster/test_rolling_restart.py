"""Twenty workers, two replicas and the server, restarted one after the other while a run trains on them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from command_line import ROOT
from tinkerscript.lifecycle import INTERRUPTED
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.processes.launcher import free_port
from tinkerscript.protocol import HANDED_BACK
from tinkerscript.server.store.sqlite import STORE_FILE

TESTS = ROOT / "tests"
WORKERS, AT_ONCE, KEY = 20, 5, "the-replicas-key"
LONG_S = 400
"""For what takes seconds on an idle machine."""

LOOK_S = 0.05
"""Seconds between two looks at a condition."""


@dataclass
class Fleet:
    """The processes of a run, as somebody on several machines starts them: each by a command of its own."""

    folder: Path
    server_port: int = field(default_factory=free_port)
    replica_ports: Sequence[int] = field(default_factory=lambda: (free_port(), free_port()))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str, **environ: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environ,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def code(self, name: str, *, within_s: float) -> int:
        """The exit code of a process that ends."""
        try:
            return self.processes[name].wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} did not end within {within_s:g} s:\n{self.log(name)[-2000:]}")

    def until(
        self, condition: Callable[[], object], what: str, *, seconds: float = LONG_S, by: str = "trainer"
    ) -> None:
        """Wait for what the process called `by` brings about; fails as soon as that ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s:\n{self.log(by)[-3000:]}"
            with suppress(subprocess.TimeoutExpired):
                self.processes[by].wait(timeout=LOOK_S)
                pytest.fail(f"{by} ended:\n{self.log(by)[-3000:]}")

    def server(self) -> None:
        self.start("server", "tinkerscript", "server", "--run-dir", "run")

    def replica(self, number: int) -> None:
        options = {
            **{"model": str(TINY_MODEL), "served-model-name": "base", "host": "127.0.0.1"},
            **{"port": str(self.replica_ports[number]), "dtype": "float32"},
            **{"max-lora-rank": "8", "max-loras": "4", "max-cpu-loras": "4"},
            **{"tensor-parallel-size": "1", "logprobs-mode": "processed_logprobs"},
            **{"generation-config": "vllm"},
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        path = os.pathsep.join(map(str, (TESTS / "launched", TESTS)))
        self.start(
            f"replica-{number}",
            *("vllm.entrypoints.openai.api_server", *words, "--enable-lora", "--enforce-eager"),
            PYTHONPATH=path,
            PYTHONWARNINGS="ignore",
            VLLM_API_KEY=KEY,
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
            TINKERSCRIPT_ADAPTERS=str(self.folder / "run" / "adapters"),
        )

    def worker(self, number: int) -> None:
        """Every other one has no time to finish what it has when it is stopped."""
        drain_s = "20" if number % 2 else "0.2"
        self.start(
            f"worker-{number}",
            *("tinkerscript", "worker", str(TESTS / "cluster" / "steady.py"), "--concurrency", "1"),
            *("--server", f"http://127.0.0.1:{self.server_port}", "--client-uuid", f"worker-{number}"),
            *("--drain-timeout", drain_s),
            THINK="4",
            RELEASE=str(self.folder / "release"),
        )

    def train(self) -> None:
        self.start("trainer", "tinkerscript", "train", "config.yaml", "--join", "run", REPLICAS_KEY=KEY)

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.server_port}/metrics", timeout=30).text

    def claimed(self) -> float:
        line = 'tinkerscript_episodes{state="claimed",type="train"} '
        found = [each for each in self.metrics().splitlines() if each.startswith(line)]
        return float(found[0].rpartition(" ")[2])

    def step(self) -> int:
        path = self.folder / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def restart(self, names: Sequence[str], again: Callable[[int], None]) -> list[int]:
        """Stop these processes with SIGTERM, wait for them, and start them again; their exit codes."""
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        codes = [self.code(name, within_s=60) for name in names]
        for name in names:
            again(int(name.rpartition("-")[2]) if "-" in name else 0)
        return codes


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(tmp_path)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    config: dict[str, Any] = {
        "experiment_dir": "run",
        "interchange_server": {"interchange_server_port": found.server_port, "max_attempts": 1},
        "task": {
            "name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
            "train_args": {"split": "train"},
        },
        "engine": {"lora": {"rank": 8}},
        "sampling": {"max_tokens": 4},
        "inference": {
            "backend": "vllm",
            "replicas": [f"http://127.0.0.1:{port}" for port in found.replica_ports],
            "api_key_env": "REPLICAS_KEY",
            "start_timeout_s": 90,
        },
        "training": {"steps": 24, "groups_per_step": 6, "group_size": 4},
        "evaluation": {"episodes": 0},
        "workers": {"count": 0},
    }
    text = yaml.safe_dump(config)
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "run" / "config.yaml").write_text(text)
    yield found
    for process in found.processes.values():
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_rolling_restart_fails_no_episode(fleet: Fleet) -> None:
    """An episode may be claimed once and fails if its attempt does: max_attempts is 1."""
    fleet.server()
    fleet.until((fleet.folder / "run" / "server.json").exists, "server", by="server")
    for number in range(2):
        fleet.replica(number)
    for number in range(WORKERS):  # Before there is a trainer.
        fleet.worker(number)
    fleet.train()
    fleet.until(lambda: fleet.step() >= 1, "first step")
    serving = 'tinkerscript_replica_serving{replica="http://127.0.0.1:%d"} 1.0'
    for port in fleet.replica_ports:
        fleet.until(lambda port=port: serving % port in fleet.metrics(), "a replica in /metrics")
    for number in range(2):
        fleet.restart([f"replica-{number}"], fleet.replica)
        for first in range(number * WORKERS // 2, (number + 1) * WORKERS // 2, AT_ONCE):
            fleet.until(lambda: fleet.claimed() >= 0.9 * WORKERS, "worker with an episode")
            names = [f"worker-{each}" for each in range(first, first + AT_ONCE)]
            assert fleet.restart(names, fleet.worker) == [INTERRUPTED] * AT_ONCE
        again = f":{fleet.replica_ports[number]} samples again"
        fleet.until(lambda again=again: again in fleet.log("trainer"), again)
    step = fleet.step()
    assert fleet.restart(["server"], lambda _: fleet.server()) == [0]
    fleet.until(lambda: fleet.step() > step, "step after the restarts")
    assert fleet.processes["trainer"].poll() is None, "all of this happened while the run went on"
    (fleet.folder / "release").touch()
    assert fleet.code("trainer", within_s=200) == 0, fleet.log("trainer")[-3000:]
    fleet.processes["server"].send_signal(signal.SIGTERM)
    ended = time.monotonic()
    assert [fleet.code(f"worker-{number}", within_s=20) for number in range(WORKERS)] == [0] * WORKERS
    assert time.monotonic() - ended < 10
    check_episodes(fleet)


def check_episodes(fleet: Fleet) -> None:
    summary = json.loads((fleet.folder / "run" / "summary.json").read_text())
    assert (summary["episodes_lost"], summary["episodes_failed"]) == (0, 0)
    with closing(sqlite3.connect(fleet.folder / "run" / STORE_FILE)) as store:
        rows = store.execute("SELECT state, failures FROM episodes").fetchall()
    failures = [failure for _, text in rows for failure in json.loads(text)]
    kinds = {failure["kind"] for failure in failures}
    assert kinds == {HANDED_BACK} or kinds == {HANDED_BACK, "cancelled"}, failures
    assert {state for state, _ in rows} <= {"accepted", "failed"}
