"""`anthropic`, asynchronous: the SDK's own tool runner makes the loop."""

from __future__ import annotations

from typing import Any

import anthropic
import travel
from anthropic import beta_async_tool
from features import conversations, serve
from travel import SYSTEM

MODEL = "policy"


@beta_async_tool
async def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return travel.get_weather(city)


@beta_async_tool
async def difference(a: float, b: float) -> str:
    """a minus b.

    Args:
        a: The one.
        b: The other.
    """
    return str(travel.difference(a, b))


async def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    texts: list[str] = []
    messages: list[Any] = []
    async with anthropic.AsyncAnthropic() as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            runner = client.beta.messages.tool_runner(
                model=MODEL,
                max_tokens=4000,
                system=SYSTEM,
                tools=[get_weather, difference],
                messages=messages,
                stream=stream,
            )
            async for step in runner:
                reply = await step.get_final_message() if stream else step
                messages.append({"role": "assistant", "content": reply.content})
                if results := await runner.generate_tool_call_response():
                    messages.append(results)
            texts.append("".join(block.text for block in reply.content if block.type == "text"))
    return {"texts": texts}


if __name__ == "__main__":
    serve(*conversations(agent))
