"""`pydantic-ai`: its agent, over the API that the argument names: `chat`, `responses` or `anthropic`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import travel
from features import serve
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ModelMessage
from travel import AGAIN, BROKEN, CONVERSATION, FORCED, OBJECT, SHORT, SYSTEM

MODEL = {
    "chat": "openai-chat:policy",
    "responses": "openai-responses:policy",
    "anthropic": "anthropic:policy",
}[sys.argv[1]]


class City(BaseModel):
    """A city."""

    city: str
    population: int


class Choice(BaseModel):
    """A city that was chosen."""

    city: str


async def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    traveller = Agent(MODEL, instructions=SYSTEM, tools=[travel.get_weather, travel.difference])
    history: list[ModelMessage] = []
    texts: list[str] = []
    for question in questions:
        if stream:
            async with traveller.run_stream(question, message_history=history) as result:
                texts.append(await result.get_output())
                history = result.all_messages()
        else:
            result = await traveller.run(question, message_history=history)
            texts.append(result.output)
            history = result.all_messages()
    return {"texts": texts}


def conversation() -> Any:
    return asyncio.run(agent(CONVERSATION, stream=False))


def streaming() -> Any:
    return asyncio.run(agent(CONVERSATION, stream=True))


def broken_call() -> Any:
    return asyncio.run(agent((BROKEN, AGAIN), stream=False))


def required_tool() -> Any:
    """A tool's arguments as the answer: pydantic-ai asks for `tool_choice` required."""
    from pydantic_ai import ToolOutput

    chooser = Agent(MODEL, output_type=ToolOutput(Choice, name="get_weather"))
    return {"called": ["get_weather"] if chooser.run_sync(FORCED).output.city == "Lima" else []}


def structured() -> Any:
    reporter = Agent(MODEL, output_type=NativeOutput(City))
    return {"texts": [reporter.run_sync(OBJECT).output.model_dump_json()]}


def retry() -> Any:
    return {"texts": [Agent(MODEL).run_sync(SHORT).output]}


if __name__ == "__main__":
    serve(conversation, streaming, broken_call, required_tool, structured, retry)
