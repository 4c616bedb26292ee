"""`openai`, Responses, asynchronous: an agent loop that goes on by `previous_response_id`."""

from __future__ import annotations

from typing import Any

import openai
from features import conversations, serve
from travel import SCHEMAS, SYSTEM, call

MODEL = "policy"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": False}
    for name, schema in SCHEMAS.items()
]


async def ask(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    if not stream:
        return await client.responses.create(model=MODEL, **options)
    final = None
    async for event in await client.responses.create(model=MODEL, stream=True, **options):
        if event.type == "response.completed":
            final = event.response
    return final


async def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    texts: list[str] = []
    previous: str | None = None
    async with openai.AsyncOpenAI() as client:
        for question in questions:
            items: list[Any] = [{"role": "user", "content": question}]
            while items:
                options = {"previous_response_id": previous} if previous else {}
                response = await ask(client, stream, instructions=SYSTEM, tools=TOOLS, input=items, **options)
                previous = response.id
                items = [
                    {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": call(item.name, item.arguments),
                    }
                    for item in response.output
                    if item.type == "function_call"
                ]
            texts.append(response.output_text)
    return {"texts": texts}


if __name__ == "__main__":
    serve(*conversations(agent))
