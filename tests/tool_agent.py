"""A rollout script with two tools: it asks three questions and runs the tools that the model calls."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

MOST_CALLS = 9


def function(name: str, description: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    function("lookup_price", "Look up the price of an item.", "item"),
    function("calculator", "Evaluate an arithmetic expression.", "expression"),
]
QUESTIONS = ["How much is the lamp?", "What is 12+30?", "How much is the chair?"]
ARGUMENTS = [
    ("lookup_price", {"item": "lamp"}),
    ("calculator", {"expression": "12+30"}),
    ("lookup_price", {"item": "chair"}),
]
"""What a good model calls for each question."""


def run_tool(name: str, arguments: str) -> str:
    values = json.loads(arguments)
    if name == "lookup_price":
        return str(10 + len(str(values.get("item"))))
    parts = [part for part in str(values.get("expression")).split("+") if part.isdigit()]
    return str(sum(map(int, parts)))


async def rollout(episode: Any) -> float:
    """The reward is any number that differs between the episodes of a group, so that each of them trains."""
    messages: list[dict[str, Any]] = []
    asked = 0
    async with AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as client:
        for _ in range(MOST_CALLS):
            if not messages or messages[-1]["role"] == "assistant":
                if asked == len(QUESTIONS):
                    break
                messages.append({"role": "user", "content": QUESTIONS[asked]})
                asked += 1
            made = await client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]
                tools=TOOLS,  # type: ignore[arg-type]
                max_tokens=48,
            )
            message = made.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert call.type == "function"
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return int(episode.episode_uuid, 16) % 1009 / 1009
