"""A whole run over the network: real server, real worker, and what its ledger says at the end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plain_sums import SUMS
from run_ledger import ask, dictionaries, results
from short_runs import short_run
from tinkerscript.cli import app
from tinkerscript.client import Episode, TinkerScriptClient, run
from tinkerscript.config import dump_config
from tinkerscript.errors import EngineError, RequestRefusedError
from tinkerscript.ledger.compression import unpacked
from tinkerscript.page.transcript_view import parsed
from tinkerscript.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.testing import QuietReporter
from tinkerscript.train.backends import BACKENDS
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.run import run_training


async def test_every_episode_of_a_run_is_in_its_ledger_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = short_run(
        "run",
        networked=True,
        interchange_server={"interchange_method": "tcp"},
        task={"train_args": {"split": "train"}, "eval_args": {"split": "test"}},
        training={"steps": 2, "groups_per_step": 4, "group_size": 3},
        evaluation={"episodes": 6},
    )
    folder = await run_training(config, QuietReporter())
    summary = json.loads((folder.path / "summary.json").read_text())
    episodes = 2 * 4 * 3 + 2 * 6
    assert summary["train_episodes"] == 2 * 4 * 3
    assert summary["episodes_accepted"] == episodes
    assert (summary["episodes_lost"], summary["sequences_per_episode"]) == (0, 1.0)
    assert summary["max_abs_dlogp"] <= 1e-4

    accepted = results(folder.path)
    assert len(accepted) == episodes
    assert {call.policy_version for episode in accepted for call in episode.calls} == {0, 1, 2}
    assert all(json.loads(call.reply)["role"] == "assistant" for e in accepted for call in e.calls)

    transcripts = ask(folder.path, "SELECT transcript FROM transcripts")
    assert len(transcripts) == episodes
    for (data,) in transcripts:
        kinds = {
            json.loads(bytes(event))["event"]
            for event in parsed(unpacked(data, dictionaries(folder.path))).events
        }
        assert {"model", "score"} <= kinds
    used = ask(folder.path, "SELECT episode, step FROM trained ORDER BY episode")
    assert [episode for episode, _ in used] == sorted(each.sequence for each in accepted)
    assert {step for _, step in used} == {0, 1, 2}
    assert ask(folder.path, "SELECT count(*) FROM episodes WHERE NOT consumed") == [(0,)]


async def test_a_broken_client_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails from the first second on, while the run's own worker still loads its task."""
    monkeypatch.chdir(tmp_path)
    config = short_run(
        "run",
        networked=True,
        training={"steps": 2, "groups_per_step": 4, "group_size": 3},
        evaluation={"episodes": 40},
        workers={"concurrency": 4},
    )
    refusals: list[str] = []

    def broken(episode: Episode) -> float:
        raise OSError("no space left on the device")

    def fail() -> None:
        path = tmp_path / "run" / "server.json"
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, "the run's server did not start"
            time.sleep(0.05)
        client = TinkerScriptClient(json.loads(path.read_text())["url"], client_uuid="broken", timeout_s=5)
        with client, pytest.raises(RequestRefusedError) as refused:
            run(broken, client=client, concurrency=4)
        refusals.append(str(refused.value))

    failing = threading.Thread(target=fail)
    failing.start()
    reporter = QuietReporter()
    folder = await run_training(config, reporter)
    failing.join(timeout=30)
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_lost"]) == (2, 0)
    assert summary["train_episodes"] == 2 * 4 * 3
    (note,) = (note for note in reporter.notes if "gets no more episodes" in note)
    assert note.startswith("client 'broken' gets no more episodes for now: its last ")
    assert note.endswith(
        "attempts failed while others succeeded: task_error: OSError: no space left on the device"
    )
    assert ["is in quarantine" in refusal for refusal in refusals] == [True]


class RefusingSampler(Sampler):
    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise EngineError("the model's memory is gone")


class RefusingBackend(EmbeddedBackend):
    """It loads, and refuses every model call."""

    async def publish(self, policy_version: int) -> Sampler:
        return RefusingSampler()


AGENT = """
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def rollout(episode):
    headers = {"Authorization": f"Bearer {episode.openai_api_key}", "Content-Type": "application/json"}
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "1+1?"}]}'
    try:
        urlopen(Request(f"{episode.openai_base_url}/chat/completions", body, headers))
    except HTTPError as error:
        raise RuntimeError(error.read().decode()) from error
    raise AssertionError("a model call was answered")
"""
"""Tries once, unlike the worker of Inspect tasks, which tries for eight seconds."""


def test_an_engine_that_refuses_every_call_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BACKENDS, "refusing", lambda: RefusingBackend)
    (tmp_path / "agent.py").write_text(AGENT)
    config = short_run(
        "run",
        networked=True,
        task=SUMS,
        engine={"backend": "refusing"},
        training={"steps": 1, "groups_per_step": 2, "group_size": 2},
        workers={"script": "agent.py"},
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    ended = CliRunner().invoke(app, ["train", "run.yaml"])
    assert ended.exit_code == 2, ended.output
    assert "the model's memory is gone" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "resume with: tinkerscript train --resume run" in ended.stdout
    assert "error: step 1: all 4 episodes that ended failed:" in ended.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
