"""`openai-agents`: its runner, over Responses, or over chat completions."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import travel
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api
from features import conversations, serve
from travel import FORCED, OBJECT, SYSTEM, City

TOOLS: list[Any] = [function_tool(travel.get_weather), function_tool(travel.difference)]


def choose_api() -> None:
    """Responses is the library's default."""
    if os.environ["CLIENT_API"] == "chat":
        set_default_openai_api("chat_completions")


async def agent(questions: tuple[str, ...], *, stream: bool, **options: Any) -> dict[str, Any]:
    choose_api()
    traveller = Agent(name="Traveller", instructions=SYSTEM, model="policy", tools=TOOLS, **options)
    history: list[Any] = []
    called: list[str] = []
    texts: list[str] = []
    for question in questions:
        asked = [*history, {"role": "user", "content": question}]
        if stream:
            result: Any = Runner.run_streamed(traveller, asked)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(traveller, asked)
        history = result.to_input_list()
        texts.append(str(result.final_output))
        called += [item.raw_item.name for item in result.new_items if item.type == "tool_call_item"]
    return {"texts": texts, "called": called}


def required_tool() -> Any:
    settings = ModelSettings(tool_choice="required")
    return asyncio.run(agent((FORCED,), stream=False, model_settings=settings))


def structured() -> Any:
    choose_api()
    reporter = Agent(name="Reporter", model="policy", output_type=City)
    result = asyncio.run(Runner.run(reporter, OBJECT))
    return {"texts": [result.final_output.model_dump_json()]}


if __name__ == "__main__":
    serve(*conversations(agent), required_tool, structured)
