"""Claude Code, Codex CLI, mini-swe-agent and opencode, unmodified, on a task: edits, side calls, ends."""

from __future__ import annotations

import json
import os

import mending
import pytest
from mender import MENDING
from workshop import Workshop

from tinkerscript.trainer_link.messages import Result

AT_ONCE = int(os.environ.get("AGENTS_AT_ONCE", "2"))

SEQUENCES = {"claude-code": 1, "codex": 1, "mini-swe-agent": 1, "opencode": 2}
"""Training sequences of an episode: the conversation, and a side call for opencode's title."""


def explained(result: Result) -> dict[str, str]:
    """What the scorer said of an episode."""
    return json.loads(result.workflow_output)["metadata"]["explanations"]["passes_its_test"]


@pytest.mark.parametrize("agent", MENDING)
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(600)
async def test_an_agent_repairs_a_function(workshop: Workshop, agent: str) -> None:
    workshop.plays(list(MENDING[agent]))
    async with workshop.worker(agent, at_once=AT_ONCE) as worker:
        uuids = await workshop.register(AT_ONCE)
        results = await workshop.results(uuids, worker)
    for result in results:
        verdict = explained(result)
        assert result.reward == 1.0, verdict
        assert verdict["answer"] == mending.BROKEN.replace("-", "+")
        assert verdict["explanation"].splitlines()[0] == "the test passed"
        assert sum(call.side for call in result.calls) == SEQUENCES[agent] - 1
    workshop.check_calls(results, sequences=SEQUENCES[agent])
