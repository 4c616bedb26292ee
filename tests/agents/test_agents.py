"""Claude Code, Codex CLI, mini-swe-agent and opencode, unmodified, on a task: edits, side calls, ends."""

from __future__ import annotations

from typing import Any

import mending
import pytest
from mender import MENDING
from workshop import Workshop

from tinkerscript.trainer_link.messages import EpisodeAccepted

FEW, MANY = 2, 20
"""Episodes at once."""

LIGHT = "codex"
"""The agent that takes the least processor time and memory."""

WITHIN_S = 900.0
"""Twenty of opencode take 6 minutes of two busy cores."""

SEQUENCES = {"claude-code": 1, "codex": 1, "mini-swe-agent": 1, "opencode": 2}
"""Training sequences of an episode: the conversation, and a side call for opencode's title."""


def explained(result: EpisodeAccepted) -> dict[str, str]:
    """What the scorer said of an episode."""
    explanations: Any = result.metadata["explanations"]
    return explanations["passes_its_test"]


@pytest.mark.parametrize(
    ("agent", "at_once"),
    [
        *((agent, FEW) for agent in MENDING),
        *(pytest.param(agent, MANY, marks=pytest.mark.long) for agent in MENDING),
    ],
)
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(1000)
async def test_agents_repair_a_function(workshop: Workshop, agent: str, at_once: int) -> None:
    workshop.plays(list(MENDING[agent]))
    async with workshop.worker(agent, at_once=at_once, time_limit_s=WITHIN_S) as worker:
        uuids = await workshop.register(at_once)
        results = await workshop.results(uuids, worker, within_s=WITHIN_S)
    assert len({result.episode_uuid for result in results}) == at_once
    for result in results:
        verdict = explained(result)
        assert result.reward == 1.0, verdict
        assert verdict["answer"] == mending.BROKEN.replace("-", "+")
        assert verdict["explanation"].splitlines()[0] == "the test passed"
        assert sum(call.side for call in result.calls) == SEQUENCES[agent] - 1
    workshop.check_calls(results, sequences=SEQUENCES[agent])
