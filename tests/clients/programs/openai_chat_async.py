"""`openai`, chat completions: an agent loop over the async client; streams are put together by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from features import conversations, serve
from travel import CHAT_TOOLS, SHORT, SYSTEM, call

MODEL = "policy"


async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    """The assistant's message, from its deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    chunks = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in chunks:
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for part in delta.tool_calls or ():
            known = calls.setdefault(
                part.index, {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            known["function"]["name"] += part.function.name or ""
            known["function"]["arguments"] += part.function.arguments or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


async def whole(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
    return reply.choices[0].message.to_dict()


async def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    texts: list[str] = []
    messages: list[Any] = [{"role": "developer", "content": SYSTEM}]
    async with openai.AsyncOpenAI() as client:
        for question in questions:
            messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
            while True:
                message = await (streamed if stream else whole)(client, messages)
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for each in message["tool_calls"]:
                    result = call(each["function"]["name"], each["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})
            texts.append(message["content"])
    return {"texts": texts}


async def _hang_up() -> Any:
    """Be cancelled amid a stream, then ask again."""
    messages: list[Any] = [{"role": "user", "content": SHORT}]
    async with openai.AsyncOpenAI() as client:
        began = asyncio.Event()

        async def read() -> None:
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True
            ):
                if chunk.choices and chunk.choices[0].delta.content:
                    began.set()

        reading = asyncio.create_task(read())
        await began.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        message = await whole(client, messages)
    return {"texts": [message["content"]]}


def hang_up() -> Any:
    return asyncio.run(_hang_up())


if __name__ == "__main__":
    serve(*conversations(agent), hang_up)
