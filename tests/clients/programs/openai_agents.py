"""`openai-agents`: its runner, over Responses or, with the argument `chat`, over chat completions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import travel
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api
from features import serve
from pydantic import BaseModel
from travel import AGAIN, BROKEN, CONVERSATION, FORCED, OBJECT, SHORT, SYSTEM

set_default_openai_api("chat_completions" if "chat" in sys.argv else "responses")

TOOLS: list[Any] = [function_tool(travel.get_weather), function_tool(travel.difference)]


class City(BaseModel):
    """A city."""

    city: str
    population: int


async def agent(questions: tuple[str, ...], *, stream: bool, **options: Any) -> dict[str, Any]:
    traveller = Agent(name="Traveller", instructions=SYSTEM, model="policy", tools=TOOLS, **options)
    history: list[Any] = []
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
    return {"texts": texts}


def conversation() -> Any:
    return asyncio.run(agent(CONVERSATION, stream=False))


def streaming() -> Any:
    return asyncio.run(agent(CONVERSATION, stream=True))


def broken_call() -> Any:
    return asyncio.run(agent((BROKEN, AGAIN), stream=False))


def required_tool() -> Any:
    settings = ModelSettings(tool_choice="required")
    asyncio.run(agent((FORCED,), stream=False, model_settings=settings))
    return {"called": ["get_weather"]}


def structured() -> Any:
    reporter = Agent(name="Reporter", model="policy", output_type=City)
    result = asyncio.run(Runner.run(reporter, OBJECT))
    return {"texts": [result.final_output.model_dump_json()]}


def retry() -> Any:
    return {"texts": [asyncio.run(Runner.run(Agent(name="Painter", model="policy"), SHORT)).final_output]}


if __name__ == "__main__":
    serve(conversation, streaming, broken_call, required_tool, structured, retry)
