"""OpenAI Responses through the `openai` package, unchanged but for base URL and key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model_clients import PARAMETERS, SUMS, ScriptedServer
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response

from serving import serving
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.server.claims import ServedModel
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.metrics import ServerMetrics

TOOL: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}


@pytest.fixture(scope="module")
def served(byte_model: Path) -> Iterator[ScriptedServer]:
    served = ScriptedServer(byte_model)
    with serving(served.app) as served.url:
        yield served


def connection(served: ScriptedServer, key: str) -> dict[str, Any]:
    return {"base_url": f"{served.url}/v1", "api_key": key, "max_retries": 0}


def ask(client: OpenAI, stream: bool, **fields: Any) -> Response:
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "instructions": "Add.", **fields}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        response = events.get_final_response()
    assert told == response.output_text
    return response


@pytest.mark.parametrize(
    ("key", "stream", "dumped"), [("key0", False, False), ("key1", True, False), ("key2", True, True)]
)
def test_a_multi_turn_tool_loop(served: ScriptedServer, key: str, stream: bool, dumped: bool) -> None:
    with OpenAI(**connection(served, key)) as client:
        items: list[Any] = [{"role": "user", "content": "add"}]
        first = ask(client, stream, input=items, store=False)
        assert [item.type for item in first.output] == ["reasoning", "message", *["function_call"] * 2]
        calls = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump() for item in first.output] if dumped else first.output
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(number)}
            for number, call in enumerate(calls)
        ]
        second = ask(client, stream, input=items, store=False)
        assert second.output_text == SUMS
        items += [*second.output, {"role": "user", "content": "hello"}]
        third = ask(client, stream, input=items, store=False)
        assert third.output_text == "hello"
        assert third.usage is not None
        assert third.usage.output_tokens == 6
    served.check_one_sequence(key, 3)


@pytest.mark.parametrize(("key", "stream"), [("key3", False), ("key4", True)])
def test_going_on_by_previous_response_id(served: ScriptedServer, key: str, stream: bool) -> None:
    with OpenAI(**connection(served, key)) as client:
        first = ask(client, stream, input="add")
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": str(number)}
            for number, item in enumerate(i for i in first.output if i.type == "function_call")
        ]
        second = ask(client, stream, input=outputs, previous_response_id=first.id)
        assert second.output_text == SUMS
        assert ask(client, stream, input="bye", previous_response_id=second.id).output_text == "bye"
    served.check_one_sequence(key, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_is_served_goes_on_by_previous_response_id(byte_model: Path, stream: bool) -> None:
    """As a claim does, to the byte, for the key that had the response; what is not stored is forgotten."""
    metrics = ServerMetrics(EpisodeBook(clock=lambda: 0.0, max_attempts=1))
    served = ScriptedServer(byte_model, ServedModel(None, metrics))
    with serving(served.app) as served.url, OpenAI(**connection(served, "one")) as client:
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
        with OpenAI(**connection(served, "two")) as other:
            for asks, response in ((other, first), (client, third)):
                with pytest.raises(openai.BadRequestError, match="no response with the id") as refused:
                    ask(asks, stream, input="more", previous_response_id=response.id)
                assert refused.value.code == "previous_response_not_found"


def test_a_model_that_is_served_without_a_token_needs_no_key(byte_model: Path) -> None:
    metrics = ServerMetrics(EpisodeBook(clock=lambda: 0.0, max_attempts=1))
    served = ScriptedServer(byte_model, ServedModel(None, metrics))
    with serving(served.app) as url:
        reply = httpx.post(f"{url}/v1/responses", json={"model": "any", "input": "bye"}, timeout=30)
    assert reply.status_code == 200, reply.text


async def test_the_async_client_streams(served: ScriptedServer) -> None:
    async with AsyncOpenAI(**connection(served, "key5")) as client:
        items: list[Any] = []
        for turn in range(3):
            items.append({"role": "user", "content": f"hi {turn}"})
            events = [
                event
                async for event in await client.responses.create(model="policy", input=items, stream=True)
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == f"hi {turn}"
            items += events[-1].response.output
    served.check_one_sequence("key5", 3)
