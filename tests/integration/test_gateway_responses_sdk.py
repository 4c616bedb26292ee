"""OpenAI Responses of a served model through the `openai` package; `tests/clients` plays those of claims."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model_clients import PARAMETERS, SUMS, ScriptedServer
from openai import OpenAI
from openai.types.responses import Response

from serving import serving
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.server.claims import ServedModel
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.metrics import ServerMetrics

TOOL: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}


@pytest.fixture
def served(byte_model: Path) -> Iterator[ScriptedServer]:
    metrics = ServerMetrics(EpisodeBook(clock=lambda: 0.0, max_attempts=1))
    served = ScriptedServer(byte_model, ServedModel(None, metrics))
    with serving(served.app) as served.url:
        yield served


def connection(served: ScriptedServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def ask(client: OpenAI, stream: bool, **fields: Any) -> Response:
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "instructions": "Add.", **fields}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        response = events.get_final_response()
    assert told == response.output_text
    return response


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_is_served_goes_on_by_previous_response_id(served: ScriptedServer, stream: bool) -> None:
    """As a claim does, to the byte, for the key that had the response; what is not stored is forgotten."""
    with connection(served, "one") as client, connection(served, "two") as other:
        more: Any = {"extra_body": {"return_token_ids": True}}
        first = ask(client, stream, input="add", **more)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": str(number)}
            for number, item in enumerate(i for i in first.output if i.type == "function_call")
        ]
        second = ask(client, stream, input=outputs, previous_response_id=first.id, **more)
        assert second.output_text == SUMS
        third = ask(client, stream, input="bye", previous_response_id=second.id, store=False)
        assert third.output_text == "bye"
        for response, asked in zip((first, second), served.sampler.requests[1:], strict=True):
            ids = response.model_extra or {}
            assert asked.prompt.startswith(pack_ids(ids["prompt_token_ids"] + ids["token_ids"]))
        for asks, response in ((other, first), (client, third)):
            with pytest.raises(openai.BadRequestError, match="no response with the id") as refused:
                ask(asks, stream, input="more", previous_response_id=response.id)
            assert refused.value.code == "previous_response_not_found"
    without_key = httpx.post(f"{served.url}/v1/responses", json={"model": "any", "input": "bye"}, timeout=30)
    assert without_key.status_code == 200, without_key.text
