"""An error in one request or one episode, at any stage, never reaches another: a neighbor goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from failing_ledger import VICTIM, FailingLedger, opened, planted
from interchange_helpers import collect, new_episodes
from interchange_setup import OUTPUT, Setup, serving
from tinkerscript.gateway.dialects import ChatCompletions
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.protocol import ClaimEpisodeResponse
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.testing import ScriptedSampler
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.trainer_link.framing import MAX_MESSAGE_BYTES
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

pytestmark = pytest.mark.timeout(60)

MARK = "plant-it-here"
"""In what the victim says, and in nobody else's words."""

SEAMS: dict[str, tuple[type[Any], str]] = {
    "parse": (ChatCompletions, "parse"),
    "render": (ChatRenderer, "render"),
    "reply": (ChatCompletions, "reply"),
    "end_episode": (EpisodeBook, "end"),
    "trainer message": (EpisodeBook, "cancel"),
}
"""Stage -> the class and the method that does it."""

REASONS = {"delivery": "planted: delivery", "size": f"carries {MAX_MESSAGE_BYTES}"}
"""Stage of the delivery to the trainer -> part of the reason with which the episode fails."""


@pytest.fixture
async def server(tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr("tinkerscript.server.process.open_ledger", opened)
    tokenizer = LightTokenizer(byte_model)

    def script(prompt: list[int]) -> list[int]:
        if FailingLedger.stage == "sample" and MARK in tokenizer.decode(prompt):
            raise RuntimeError("planted: sample")
        return [72, 105, prompt[-1]]

    sampler = ScriptedSampler(script, policy_version=4)
    async with serving(tmp_path, byte_model, sampler=sampler) as setup:
        yield setup


async def end(server: Setup, claim: ClaimEpisodeResponse) -> httpx.Response:
    headers = {"Authorization": f"Bearer {claim.openai_api_key}"}
    return await server.http.post("/end_episode", json={"workflow_output": OUTPUT}, headers=headers)


@pytest.mark.parametrize("stage", [*SEAMS, "sample", "record", *REASONS])
async def test_a_defect_at_one_stage_is_its_own_request_alone(
    server: Setup, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.link.register(new_episodes(VICTIM, "neighbor", "later"))
    claim, other = await server.claim("hostile"), await server.claim("honest")
    assert claim.episode_uuid == VICTIM
    monkeypatch.setattr(FailingLedger, "stage", stage)
    if stage in SEAMS:
        owner, name = SEAMS[stage]
        monkeypatch.setattr(owner, name, planted(getattr(owner, name), stage, MARK))
    called = await server.call(claim.openai_api_key, MARK)
    assert called.status_code == (500 if stage in ("parse", "render", "reply", "sample", "record") else 200)
    if stage == "trainer message":
        server.link.cancel([VICTIM], "not needed")
    ended = await end(server, claim)
    assert ended.status_code == (500 if stage == "end_episode" else 200)
    for neighbor in (other, await server.claim("honest")):
        assert (await server.call(neighbor.openai_api_key)).status_code == 200
        assert (await end(server, neighbor)).json()["success"]
    outcomes = await collect(server.link, 2 if stage == "end_episode" else 3)
    assert isinstance(outcomes["neighbor"], EpisodeAccepted)
    assert isinstance(outcomes["later"], EpisodeAccepted)
    assert [len(outcomes[name].calls) for name in ("neighbor", "later")] == [1, 1]  # type: ignore[union-attr]
    if stage in REASONS:
        assert isinstance(failed := outcomes[VICTIM], EpisodeFailed)
        assert "undeliverable" in str(failed.failures)
        assert REASONS[stage] in str(failed.failures)
    assert (await server.status()).trainer_connected
