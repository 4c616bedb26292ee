"""SDKs, agent frameworks and libraries of environments, unchanged but for base URL and key.

Each feature of a client is played against the server and checked against the sampler's log.

`scripts/clients_table.py` writes `docs/clients.md` from `results.json`, what the last recorded run found. A
run that finds otherwise fails, so the page stays true.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import story
from oracle import check_exact
from player import Players
from roster import (
    BROKEN_CALL,
    CLIENTS,
    CONVERSATION,
    HANG_UP,
    LOGPROBS,
    MESSAGES,
    PARALLEL,
    REFUSED,
    REQUIRED_TOOL,
    RETRY,
    SAMPLES,
    SNIPPET,
    STREAMING,
    STRUCTURED,
    Client,
)
from scripted_model import Logged
from stage import Stage

from tinkerscript.rollouts.call import Call

RESULTS = Path(__file__).parent / "results.json"
FOUND: dict[str, dict[str, Any]] = {}
"""Rows of this session, by the client's key."""

TALK = [story.FINAL, story.CHOSEN, story.BYE]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("client", "feature"),
    [pytest.param(each, case, id=f"{each.key}-{case}") for each in CLIENTS for case in each.cases],
)
async def test_feature(stage: Stage, players: Players, client: Client, feature: str) -> None:
    """What was sampled, recorded and told in an episode of a feature is the same, and is noted."""
    player = await players.get(client)
    claim = await stage.claim()
    stage.model.refusals = int(feature == RETRY)
    stage.model.hangs = feature == HANG_UP
    url = claim.openai_base_url
    if client.api == MESSAGES and feature != SNIPPET:
        url = url.removesuffix("/v1")
    outcome = await player.play(client, feature, url, claim.openai_api_key)
    calls = await stage.end(claim)
    assert not outcome.error, player.output()
    row = FOUND.setdefault(client.key, {"version": outcome.version, "works": []})
    if feature == REFUSED:
        check_refused(outcome.value, calls)
        row["refused"] = outcome.value
        return
    check_value(feature, outcome.value, stage.model.log)
    apart = 3 if feature in (SAMPLES, PARALLEL) else 1
    check_exact(calls, stage.model.log, sequences=apart)
    check_requests(feature, stage)
    row["works"] = sorted({*row["works"], feature})


def check_requests(feature: str, stage: Stage) -> None:
    """The sampler was asked as the feature says."""
    requests = stage.model.requests
    if feature in (CONVERSATION, STREAMING):
        assert [request.stream for request in requests] == [feature == STREAMING] * 5
    assert bool(requests[0].constraint) == (feature in (REQUIRED_TOOL, STRUCTURED))
    if feature in (RETRY, HANG_UP):
        assert len(requests) == 2


def check_refused(messages: dict[str, str], calls: list[Call]) -> None:
    """Nothing was sampled, and each message is a 400 that says what to change."""
    assert not calls
    for asked, message in messages.items():
        assert message.startswith("400 "), (asked, message)


def check_value(feature: str, value: dict[str, Any], log: list[Logged]) -> None:
    """What reached the program is what was sampled."""
    if feature == REQUIRED_TOOL:
        assert value["called"] == ["get_weather"]
        return
    if feature == STRUCTURED:
        assert [json.loads(text) for text in value["texts"]] == [json.loads(story.LIMA)]
        return
    expected = {
        BROKEN_CALL: [story.BROKEN_CALL, story.SORRY],
        SAMPLES: [story.COLOURS] * 3,
        PARALLEL: TALK * 3,
        HANG_UP: [story.COLOURS],
        RETRY: [story.COLOURS],
        SNIPPET: [story.COLOURS],
        LOGPROBS: TALK if "steps" in value else [story.COLOURS],
    }
    assert [text.strip() for text in value["texts"]] == expected.get(feature, TALK)
    if feature == LOGPROBS:
        check_logprobs(value.get("steps") or [value], log)


def check_logprobs(told: list[dict[str, Any]], log: list[Logged]) -> None:
    """Ids and log probabilities that the program was told, against the sampler's."""
    for step, entry in zip(told, log, strict=True):
        for name, kept, kind in (
            ("prompt_ids", entry.prompt, "<i4"),
            ("ids", entry.sampled, "<i4"),
            ("logprobs", entry.logprobs, "<f4"),
        ):
            if name in step:
                assert np.array(step[name], dtype=kind).tobytes() == kept
        assert step.keys() & {"ids", "logprobs"}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.key)
def test_the_page_says_what_was_found(client: Client) -> None:
    """What was found of a client is what `docs/clients.md` says; CLIENTS_RECORD=1 records it instead."""
    assert client.key in FOUND, "run the tests of the client's features as well: the whole file"
    rows = json.loads(RESULTS.read_text())
    if os.environ.get("CLIENTS_RECORD"):
        rows[client.key] = FOUND[client.key]
        RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    assert FOUND[client.key] == rows.get(client.key), (
        "run with CLIENTS_RECORD=1, then scripts/clients_table.py"
    )
