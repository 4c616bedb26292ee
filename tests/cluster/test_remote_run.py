"""A run whose folder is at a URL, on a server that speaks S3: stopped, lost on this machine, and resumed."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import fsspec
import httpx
import pytest
from moto.server import ThreadedMotoServer
from virtual_cluster import left_of

from command_line import DEMO, SHORT, Command, as_options, metrics_lines, start
from run_ledger import ask
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.rows import TABLES
from tinkerscript.remote_folder import RemoteFolder

LONG_S = 400
"""For what takes seconds on an idle machine."""

URL = "s3://experiments/team/run"
SETTINGS = {
    **SHORT,
    "experiment_dir": URL,
    "training.checkpoint_every": 1,
    "training.inspect_log_every": 1,
    "evaluation.episodes": 8,
}


@pytest.fixture(autouse=True)
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("s3").mkdir("experiments")
    yield
    fsspec.filesystem("s3").clear_instance_cache()
    httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()  # The server's data outlives it.
    server.stop()


def finished(command: Command) -> str:
    assert command.wait(seconds=LONG_S) == 0, command.text()
    return " ".join(command.text().split())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_is_resumed_from_its_url_alone(tmp_path: Path) -> None:
    """And its model is evaluated, and trained from, where there is nothing else of the run."""
    remote, run = RemoteFolder(URL), tmp_path / "runs" / "run"
    first = start(tmp_path, "train", str(DEMO), *as_options({**SETTINGS, "training.steps": 1000}))
    first.until(lambda: remote.steps()[-1:] >= [2], seconds=200)
    first.process.send_signal(signal.SIGINT)
    assert first.wait(seconds=100) == 130, first.text()
    assert "not copied" not in first.text()
    step = remote.steps()[-1]
    shutil.rmtree(tmp_path / "runs")
    refused = start(tmp_path, "train", str(DEMO), *as_options(SETTINGS))
    assert refused.wait() == 2
    assert f"{URL} already holds a run" in " ".join(refused.text().split())

    more = f"--set=training.steps={step + 2}"
    text = finished(start(tmp_path, "train", "--resume", URL, more))
    assert f"fetching the run at {URL} into runs/run" in text
    assert f"copied to {URL}" in text
    summary = json.loads(remote.read("summary.json"))
    assert summary == json.loads((run / "summary.json").read_text())
    assert (summary["episodes_lost"], summary["steps"]) == (0, step + 2)
    assert remote.steps() == [step + 1, step + 2]
    rollouts = [f"step_{number:04d}.jsonl.gz" for number in range(1, step + 3)]
    assert [name for name in remote.names("rollouts") if name.startswith("step")] == rollouts
    assert len([name for name in remote.names("inspect") if name.endswith(".eval")]) >= step + 2
    there = tmp_path / "there"
    there.mkdir()
    (there / LEDGER_FILE).write_bytes(remote.read(LEDGER_FILE))
    for table in TABLES:
        assert ask(there, f"SELECT * FROM {table.TABLE}") == ask(run, f"SELECT * FROM {table.TABLE}")
    assert len(metrics_lines(tmp_path / "runs")) == len(remote.read("metrics.jsonl").splitlines())

    shutil.rmtree(tmp_path / "runs")
    final = f"{URL}/checkpoints/final"
    arithmetic = str(DEMO.with_name("arithmetic.py"))
    assert "score" in finished(start(tmp_path, "eval", arithmetic, "--checkpoint", final, "--limit", "4"))
    again = {**SHORT, "engine.checkpoint": final, "training.steps": 1, "evaluation.episodes": 0}
    finished(start(tmp_path, "train", str(DEMO), *as_options({**again, "experiment_dir": "from_it"})))
    assert not left_of(tmp_path, "tinkerscript", within_s=60)
