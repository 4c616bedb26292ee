"""A task of Harbor, isolated without Docker: its own instruction, tools, tests and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from claims import run_all

from outside_chat import Message, scripted_chat
from tinkerscript.workers.base_task import load_task

FILES = {
    "task.toml": """
schema_version = "1.0"

[environment]
memory_mb = 7000
workdir = "/app"
env = {GREETING = "hello"}

[verifier]
timeout_sec = 60
""",
    "instruction.md": "Write the value of GREETING into /app/said.txt.",
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
    "tests/test.sh": """#!/bin/bash
if grep -qx hello /app/said.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
}


def called(tool: str, **arguments: Any) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


@pytest.mark.parametrize(("said", "reward"), [("$GREETING", 1.0), ("GREETING", 0.0)])
async def test_a_task_runs_isolated_and_is_scored_by_its_own_tests(
    tmp_path: Path, said: str, reward: float
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    arguments = {"path": str(tmp_path), "sandbox_env_name": "bubblewrap"}
    task = load_task("inspect_harbor/harbor", arguments)

    def script(messages: list[Message]) -> Message:
        if any(message["role"] == "tool" for message in messages):
            return called("submit", answer="done")
        return called("bash", command=f"mkdir -p /app; echo {said} > /app/said.txt; cat /proc/1/comm")

    async with scripted_chat(script) as server:
        # As over the network: JSON.
        samples = [json.loads(json.dumps(dict(each))) for each in task.samples(held_out=False)]
        (output,) = await run_all(task, server.url, samples)
    told = [message for message in server.asked[-1][1] if message["role"] == "tool"]
    assert told[0]["content"] == "bwrap\n"
    assert "GREETING" in server.asked[0][1][-1]["content"]
    assert output.reward == reward
    assert not Path("/tests").exists()
    assert not Path("/app").exists()
