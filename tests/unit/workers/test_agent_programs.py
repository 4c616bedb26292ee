"""The agents' table: what each is told, what its last words are, and which folders its sandbox shows."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from tinkerscript.errors import WorkerError
from tinkerscript.gateway.dialects.agent_mode import AGENT_PREFIX
from tinkerscript.protocol import POLICY
from tinkerscript.workers.agents import AGENTS, AgentJob, agent_named, installation_of
from tinkerscript.workers.worker import WorkerOptions, run_worker

JOB = AgentJob('Say "hi"\n--then stop', f"http://127.0.0.1:8000{AGENT_PREFIX}", 40_000)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_told_the_model_and_the_prompt(name: str) -> None:
    agent = AGENTS[name]
    assert JOB.prompt in agent.arguments(JOB)
    told = "\n".join(
        [*agent.environment(JOB).values(), *agent.home_files(JOB).values(), *agent.arguments(JOB)]
    )
    assert JOB.url in told
    assert POLICY in told


def test_what_agents_read_is_well_formed() -> None:
    codex = tomllib.loads(AGENTS["codex"].home_files(JOB)[".codex/config.toml"])
    assert codex["model_context_window"] == 40_000
    opencode = json.loads(AGENTS["opencode"].home_files(JOB)[".config/opencode/opencode.json"])
    assert opencode["provider"]["tinkerscript"]["models"]["policy"]["limit"] == {
        "context": 40_000,
        "output": 10_000,
    }


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("claude-code", [{"type": "assistant"}, {"type": "result", "result": "the end"}]),
        (
            "codex",
            [
                {"type": "item.completed", "item": {"type": "agent_message", "text": "first"}},
                {"type": "item.completed", "item": {"type": "agent_message", "text": "the end"}},
                {"type": "item.completed", "item": {"type": "error", "message": "no"}},
            ],
        ),
        ("opencode", [{"type": "text", "part": {"text": "the end"}}, {"type": "step_finish", "part": {}}]),
    ],
)
def test_the_last_words_are_found_among_what_is_printed(name: str, lines: list[dict[str, object]]) -> None:
    printed = "\n".join(["a warning", "[1]", *map(json.dumps, lines)])
    assert AGENTS[name].answer(printed) == "the end"
    assert AGENTS[name].answer("killed {") == ""


def _installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = folder / "bin/codex"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def test_an_agents_folder_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _installed(tmp_path / "npm", monkeypatch)
    found = installation_of(AGENTS["codex"])
    assert found.program == program
    assert tmp_path / "npm" in found.folders
    assert str(program.parent) in found.path.split(":")


def test_a_home_folder_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(WorkerError, match="would show whole"):
        installation_of(AGENTS["codex"])


def test_an_agent_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match="'opencode' is not on the PATH"):
        installation_of(AGENTS["opencode"])
    with pytest.raises(WorkerError, match="there are claude-code, codex, mini-swe-agent, opencode"):
        agent_named("copilot")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (WorkerOptions(script="agent.py", agent="codex"), "not on a script"),
        (WorkerOptions(tasks={"games.py:Lake": {}}, agent="codex"), "agents work on Inspect tasks"),
    ],
)
def test_agents_work_on_inspect_tasks(options: WorkerOptions, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        run_worker(options)
