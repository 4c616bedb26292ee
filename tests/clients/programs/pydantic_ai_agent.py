"""`pydantic-ai`: its agent, over any of the three APIs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable
from typing import Any

import travel
from features import conversations, serve
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelMessage
from travel import FORCED, OBJECT, SYSTEM, City

MODELS = {
    "chat": "openai-chat:policy",
    "responses": "openai-responses:policy",
    "messages": "anthropic:policy",
}


def model() -> str:
    return MODELS[os.environ["CLIENT_API"]]


class Choice(BaseModel):
    """A city that was chosen."""

    city: str


async def watch(_: Any, events: AsyncIterable[Any]) -> None:
    """A handler of events makes pydantic-ai stream; `run_stream` would end at the first text."""
    async for _event in events:
        pass


async def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    traveller = Agent(model(), instructions=SYSTEM, tools=[travel.get_weather, travel.difference])
    history: list[ModelMessage] = []
    texts: list[str] = []
    for question in questions:
        handler = watch if stream else None
        result = await traveller.run(question, message_history=history, event_stream_handler=handler)
        texts.append(result.output)
        history = result.all_messages()
    return {"texts": texts}


def required_tool() -> Any:
    """A tool's arguments as the answer: pydantic-ai asks for `tool_choice` required."""
    chooser = Agent(model(), output_type=ToolOutput(Choice, name="get_weather"))
    return {"called": ["get_weather"] if chooser.run_sync(FORCED).output.city == "Lima" else []}


def structured() -> Any:
    reporter = Agent(model(), output_type=NativeOutput(City))
    return {"texts": [reporter.run_sync(OBJECT).output.model_dump_json()]}


if __name__ == "__main__":
    serve(*conversations(agent), required_tool, structured)
