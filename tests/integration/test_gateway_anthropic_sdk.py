"""Anthropic Messages through the `anthropic` package, unchanged but for base URL and key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_clients import PARAMETERS, SUMS, ScriptedServer

from serving import serving

pytestmark = pytest.mark.xdist_group("anthropic")

TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The package, which takes seconds to import, where its tests run."""
    return pytest.importorskip(
        "anthropic", reason="Inspect imports it wherever it is installed, so only `make acceptance` has it"
    )


@pytest.fixture(scope="module")
def served(byte_model: Path) -> Iterator[ScriptedServer]:
    served = ScriptedServer(byte_model)
    with serving(served.app) as served.url:
        yield served


def ask(client: Any, stream: bool, **fields: Any) -> Any:
    asked: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 300,
        "system": "Add.",
        "tools": [TOOL],
        **fields,
    }
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        told = "".join(events.text_stream)
        message = events.get_final_message()
    assert told == "".join(block.text for block in message.content if block.type == "text")
    return message


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_multi_turn_tool_loop(anthropic: Any, served: ScriptedServer, stream: bool, thinking: bool) -> None:
    key = f"key{2 * stream + thinking}"
    fields = {"thinking": THINKING} if thinking else {}
    with anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "add"}]
        first = ask(client, stream, messages=messages, **fields)
        kinds = [block.type for block in first.content]
        assert kinds == [*["thinking"] * thinking, "text", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        uses = [block for block in first.content if block.type == "tool_use"]
        assert uses[0].input == {"a": 1, "b": "é"}
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": str(number)}
            for number, use in enumerate(uses)
        ]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        counted = client.messages.count_tokens(model="policy", system="Add.", tools=[TOOL], messages=messages)
        second = ask(client, stream, messages=messages, **fields)
        assert counted.input_tokens == second.usage.input_tokens
        assert second.content[-1].text == SUMS
        answer = [block.model_dump() for block in second.content]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "hello"}]
        third = ask(client, stream, messages=messages, **fields)
        assert ([block.text for block in third.content], third.stop_reason) == (["hello"], "end_turn")
        assert third.usage.output_tokens == 6
    served.check_one_sequence(key, 3)
