"""A prompt that does not fit is an error of the dialect's own shape; the episode ends with what it has."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from interchange_helpers import collect, new_episodes
from interchange_setup import OUTPUT, serving
from tinkerscript.trainer_link.messages import EpisodeAccepted

TOO_LONG = "x" * 5000
CHAT = {"messages": [{"role": "user", "content": TOO_LONG}]}


ROUTES: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", CHAT, "messages"),
    ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
    ("/v1/responses", {"input": TOO_LONG}, "messages"),
    ("/v1/messages", CHAT | {"max_tokens": 5}, None),
]


async def test_the_episode_ends_with_what_it_has(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model) as setup:
        await setup.link.register(new_episodes("e"))
        claim = await setup.claim()
        assert (await setup.call(claim.openai_api_key)).status_code == 200
        headers = {"Authorization": f"Bearer {claim.openai_api_key}"}
        for (route, body, param), stream in product(ROUTES, (False, True)):
            asked = {"model": "policy", "stream": stream} | body
            reply = await setup.http.post(route, json=asked, headers=headers)
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            if param is None:  # Anthropic's errors have a type alone.
                assert error["type"] == "invalid_request_error"
            else:
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "context length is 4096 tokens" in error["message"]
        end = {"client_uuid": "c", "episode_uuid": "e", "attempt": 1, "workflow_output": OUTPUT}
        assert (await setup.post("/end_episode", **end))["success"]
        outcome = (await collect(setup.link, 1))["e"]
    assert isinstance(outcome, EpisodeAccepted)
    assert len(outcome.calls) == 1
