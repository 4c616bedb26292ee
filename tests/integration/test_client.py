"""The client and its runner against a real HTTP server that loses replies, is busy, and goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_exchange import Exchange
from fastapi import FastAPI
from pydantic import JsonValue
from typer.testing import CliRunner

from serving import serving
from tinkerscript.cli import CANNOT_RUN, app
from tinkerscript.client import (
    Episode,
    RunStatistics,
    TinkerScriptClient,
    run,
)
from tinkerscript.errors import (
    RequestRefusedError,
    WorkerError,
    WrongTaskError,
)
from tinkerscript.protocol import ClaimEpisodeRequest, ClaimEpisodeResponse
from tinkerscript.workers import WorkerOptions, load_rollout, run_worker

ONE_SUM = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match

@task
def one():
    return Task(dataset=[Sample(id="12+34", input="12+34=", target="46")], scorer=match())
"""


def test_the_runner_accounts_for_every_episode_of_a_plain_function(exchange: Exchange, url: str) -> None:
    exchange.queue, exchange.lost = ["e0", "e1", "e2", "e3"], {"e3"}

    def rollout(episode: Episode) -> Any:
        if episode.episode_uuid == "e2":
            raise ValueError("bad")
        return 1.0, {"of": episode.episode_uuid}

    with TinkerScriptClient(url) as client:
        done = run(rollout, client=client, max_episodes=4)
    assert done == RunStatistics(claimed=4, ended=2, failed=1, lost=1)
    assert [each.metadata for each in exchange.results.values()] == [{"of": "e0"}, {"of": "e1"}]
    (abort,) = exchange.aborted
    assert (abort.failure.kind, abort.failure.message) == ("task_error", "ValueError: bad")


class Generous(Exchange):
    """Answers a claim with every episode that it has."""

    async def _claim(self, request: ClaimEpisodeRequest) -> ClaimEpisodeResponse:
        first, *more = [await super(Generous, self)._claim(request) for _ in list(self.queue)]
        return first.model_copy(update={"more": more})


def test_a_worker_ends_with_the_first_episode_of_another_task_and_hands_back_all_that_it_has(
    tmp_path: Path,
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "from tinkerscript.errors import WrongTaskError\n"
        "def rollout(episode):\n"
        "    raise WrongTaskError('the episode is of the task X, this worker runs Y')\n"
    )
    exchange = Generous(episodes=3)
    with serving(exchange) as url:  # type: ignore[arg-type]
        result = CliRunner().invoke(app, ["worker", str(script), "--server", url, "--concurrency", "1"])
    assert result.exit_code == CANNOT_RUN
    assert result.stderr == "error: the episode is of the task X, this worker runs Y\n"
    aborts = [(abort.episode_uuid, abort.failure.kind) for abort in exchange.aborted]
    assert aborts == [(uuid, "worker_stopped") for uuid in ("e0", "e1", "e2")]
    assert exchange.aborted[0].failure.message == "the episode is of the task X, this worker runs Y"


def test_a_server_that_refuses_the_client_ends_the_run() -> None:
    with serving(FastAPI()) as url, TinkerScriptClient(url) as client, pytest.raises(RequestRefusedError):
        run(lambda episode: 1.0, client=client)


@pytest.mark.parametrize(("how", "code"), [("SIGINT", 130), ("parent", 0)])
def test_a_worker_process_ends_gracefully(
    exchange: Exchange, url: str, tmp_path: Path, how: str, code: int
) -> None:
    script = tmp_path / "agent.py"
    script.write_text("def rollout(episode): return 1.0\n", encoding="utf-8")
    options = ["--server", url, "--exit-with-parent", "--client-uuid", "w1"]
    command = [sys.executable, "-m", "tinkerscript", "worker", str(script), *options]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    exchange.wait_for(lambda: len(exchange.results) == 3)
    if how == "SIGINT":
        worker.send_signal(signal.SIGINT)
        worker.wait(timeout=20)
    _, said = worker.communicate(timeout=20)  # Which closes the pipe from its parent.
    assert worker.returncode == code
    assert "claimed=3, ended=3" in said
    assert set(exchange.claimed.values()) == {"w1"}


def test_a_worker_without_a_usable_script_says_what_is_there(tmp_path: Path, url: str) -> None:
    (tmp_path / "other.py").write_text("def helper(): ...\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind\n", encoding="utf-8")
    (tmp_path / "narrow.py").write_text("def rollout(): ...\n", encoding="utf-8")
    for name, message in {
        "missing.py": "holds broken.py, narrow.py, other.py",
        "other.py": r"no function rollout\(episode\); it defines helper",
        "broken.py": "No module named 'nothing_of_the_kind'; what it imports has to be on this machine: "
        "pip install nothing_of_the_kind",
        "narrow.py": "must take one argument",
    }.items():
        with pytest.raises(WorkerError, match=message):
            load_rollout(tmp_path / name)
    for options in (
        WorkerOptions(server_url=url),
        WorkerOptions(server_url=url, script="a", tasks={"b": {}}),
        WorkerOptions(server_url="localhost", script=str(tmp_path / "other.py")),
    ):
        with pytest.raises(WorkerError):
            run_worker(options)
    result = CliRunner().invoke(app, ["worker", str(tmp_path / "missing.py"), "--server", url])
    assert (result.exit_code, result.stderr.startswith("error: no script at")) == (2, True)


def test_the_plain_agent_contributes_episodes(exchange: Exchange, url: str) -> None:
    message = {"role": "assistant", "content": "e1"}
    reply = {"id": "x", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    exchange.api.post("/v1/chat/completions")(lambda: reply)
    exchange.model_url = f"{url}/v1"
    agent = Path(__file__).parents[2] / "examples" / "plain_agent.py"
    environ = os.environ | {"TINKERSCRIPT_SERVER_URL": url}
    with subprocess.Popen([sys.executable, str(agent)], env=environ) as process:
        exchange.wait_for(lambda: len(exchange.results) == 3)
        process.kill()
    assert {end.workflow_output.reward for end in exchange.ends} == {1.0}
    assert len(agent.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.parametrize("is_named", [True, False])
def test_a_server_cannot_make_a_worker_run_what_its_task_does_not_contain(
    exchange: Exchange, url: str, tmp_path: Path, is_named: bool
) -> None:
    """Neither a sample of its own, nor with the id of one that the task has."""
    marks = [tmp_path / "setup", tmp_path / "file"]
    hostile: dict[str, JsonValue] = {
        "id": "12+34" if is_named else "x",
        "input": "12+34=",
        "target": "46",
        "sandbox": {"type": "local"},
        "setup": f"#!/bin/sh\ntouch {marks[0]}\n",
        "files": {str(marks[1]): "here"},
    }
    (tmp_path / "tasks.py").write_text(ONE_SUM, encoding="utf-8")
    task = f"{tmp_path}/tasks.py@one"
    exchange.run_finished = True
    exchange.model_url = f"{url}/v1"
    exchange.queue, exchange.payloads = ["h"], {"h": {"task": task, "sample": hostile}}
    refusal = ""
    try:
        run_worker(WorkerOptions(server_url=url, tasks={task: {}}, client_uuid="w"))
    except WrongTaskError as error:
        refusal = str(error)
    assert [mark.exists() for mark in marks] == [False, False]
    assert ("'12+34' is another problem" if is_named else "no sample 'x'") in refusal


def test_a_task_without_inspect_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinkerscript.workers.inspect_task", None)
    with pytest.raises(WorkerError, match=r"pip install 'tinkerscript\[inspect\]'"):
        run_worker(WorkerOptions(tasks={"examples/arithmetic.py@arithmetic": {}}))
