"""Real clients, unchanged but for base URL and key, against the server; the sampler's log is the oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
import story
from clients import (
    BROKEN_CALL,
    CLIENTS,
    CONVERSATION,
    LOGPROBS,
    PARALLEL,
    REQUIRED_TOOL,
    RETRY,
    SAMPLES,
    STRUCTURED,
    Client,
)
from conftest import Players
from oracle import check_exact
from player import Outcome
from scripted_model import Logged
from stage import Stage

pytestmark = pytest.mark.asyncio(loop_scope="session")

TALK = [story.FINAL, story.CHOSEN, story.BYE]
CASES = [(client, feature) for client in CLIENTS for feature in client.features]


def case_id(case: object) -> str:
    return "-".join((case.program, *case.arguments)) if isinstance(case, Client) else str(case)


@pytest.mark.parametrize(("client", "feature"), CASES, ids=case_id)
async def test_feature(stage: Stage, players: Players, client: Client, feature: str) -> None:
    player = await players.get(client)
    claim = await stage.claim()
    stage.model.refusals = int(feature == RETRY)
    url, key = client.environ
    base_url = stage.base_url(claim)
    if url.startswith("ANTHROPIC"):
        base_url = base_url.removesuffix("/v1")
    outcome = await player.play(feature, {url: base_url, key: claim.openai_api_key})
    calls = await stage.end(claim)
    for r in stage.tap.requests: print(r.path, r.body.decode())
    print("BREAKS", [c.break_cause for c in calls])
    if feature in client.refused:
        assert client.refused[feature] in outcome.error, outcome
        assert not calls
        return
    assert not outcome.error, player.output()
    check_value(feature, outcome, stage.model.log)
    check_exact(calls, stage.model.log, sequences=3 if feature in (SAMPLES, PARALLEL) else 1)
    if feature == RETRY:
        assert len(stage.model.requests) == 2


def check_value(feature: str, outcome: Outcome, log: list[Logged]) -> None:
    """What reached the program is what was sampled."""
    value = outcome.value
    if feature == REQUIRED_TOOL:
        assert value["called"] == ["get_weather"]
        return
    if feature == STRUCTURED:
        assert [json.loads(text) for text in value["texts"]] == [json.loads(story.LIMA)]
        return
    texts = [text.strip() for text in value["texts"]]
    if feature == BROKEN_CALL:
        assert texts == [story.BROKEN_CALL, story.SORRY]
    elif feature in (SAMPLES, PARALLEL):
        assert texts == [story.COLOURS] * 3
    elif texts != TALK:
        assert texts == [story.COLOURS]
        assert feature != CONVERSATION
    if feature == LOGPROBS:
        check_logprobs(value, log)


def check_logprobs(value: dict, log: list[Logged]) -> None:
    """Ids and log probabilities that the program was told, against the sampler's."""
    steps = value.get("steps") or [value]
    assert len(steps) == len(log)
    for step, entry in zip(steps, log, strict=True):
        told = {name.removeprefix("completion_"): found for name, found in step.items()}
        if "prompt_ids" in told:
            assert np.array(told["prompt_ids"], dtype="<i4").tobytes() == entry.prompt
        if "ids" in told:
            assert np.array(told["ids"], dtype="<i4").tobytes() == entry.sampled
        if "logprobs" in told:
            assert np.array(told["logprobs"], dtype="<f4").tobytes() == entry.logprobs
