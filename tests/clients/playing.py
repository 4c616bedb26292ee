"""A feature of a client, played against the server and checked against the sampler's log."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import results
import story
from oracle import check_exact
from player import Players
from roster import (
    BROKEN_CALL,
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

TALK = [story.FINAL, story.CHOSEN, story.BYE]


def cases(clients: Sequence[Client]) -> list[Any]:
    """A pytest parameter for each feature of each client."""
    return [pytest.param(each, case, id=f"{each.key}-{case}") for each in clients for case in each.cases]


async def play(stage: Stage, players: Players, client: Client, feature: str) -> None:
    """Play a feature in an episode of its own; check what was sampled, recorded and told; note the find."""
    player = await players.get(client)
    claim = await stage.claim()
    stage.model.refusals = int(feature == RETRY)
    stage.model.hangs = feature == HANG_UP
    url = stage.base_url(claim)
    if client.api == MESSAGES and feature != SNIPPET:
        url = url.removesuffix("/v1")
    outcome = await player.play(client, feature, url, claim.openai_api_key)
    calls = await stage.end(claim)
    assert not outcome.error, player.output()
    if feature == REFUSED:
        check_refused(outcome.value, calls)
        results.found(client, outcome.version, refused=outcome.value)
        return
    check_value(feature, outcome.value, stage.model.log)
    apart = 3 if feature in (SAMPLES, PARALLEL) else 1
    check_exact(calls, stage.model.log, sequences=apart)
    check_requests(feature, stage)
    results.found(client, outcome.version, works={feature})
    if feature in (CONVERSATION, STREAMING):
        results.found(client, outcome.version, sends=results.extra_fields(client, stage.tap.requests))
    if feature == CONVERSATION:
        matched_by = {call.matched_by for call in calls if call.matched_by}
        reasoning = results.reasoning_sent(client, stage.tap.requests)
        results.found(client, outcome.version, matched_by=matched_by, reasoning=reasoning)


def check_requests(feature: str, stage: Stage) -> None:
    """The sampler was asked as the feature says."""
    requests = stage.model.requests
    if feature in (CONVERSATION, STREAMING):
        assert [request.stream for request in requests] == [feature == STREAMING] * 5
    assert bool(requests[0].constraint) == (feature in (REQUIRED_TOOL, STRUCTURED))
    # A runner of Anthropic's first asks for a thread, is refused, and sends the whole history instead.
    assert len(requests) == len([each for each in stage.tap.requests if "thread" not in each.json])
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


def check_row(client: Client) -> None:
    """What was found of a client is what `docs/clients.md` says; CLIENTS_RECORD=1 records it instead."""
    assert client.key in results.FOUND, "run the tests of the client's features as well: the whole file"
    if os.environ.get("CLIENTS_RECORD"):
        results.record(client)
    assert results.FOUND[client.key] == results.recorded().get(client.key), (
        "run with CLIENTS_RECORD=1, then scripts/clients_table.py"
    )
