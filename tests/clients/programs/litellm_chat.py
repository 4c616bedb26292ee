"""`litellm`: an agent loop over `completion`; the provider `openai/` with the model's name."""

from __future__ import annotations

from typing import Any

import litellm
from features import conversations, serve
from travel import CHAT_TOOLS, FORCED, LIMA_SCHEMA, OBJECT, SHORT, SYSTEM, call

MODEL = "openai/policy"


def ask(messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    if not stream:
        return litellm.completion(model=MODEL, messages=messages, **options).choices[0].message
    chunks = list(litellm.completion(model=MODEL, messages=messages, stream=True, **options))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            message = ask(messages, stream=stream, tools=CHAT_TOOLS)
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for each in message.tool_calls:
                result = call(each.function.name, each.function.arguments)
                messages.append(
                    {"role": "tool", "tool_call_id": each.id, "name": each.function.name, "content": result}
                )
        texts.append(message.content)
    return {"texts": texts}


def samples() -> Any:
    reply = litellm.completion(model=MODEL, messages=[{"role": "user", "content": SHORT}], n=3)
    return {"texts": [choice.message.content for choice in reply.choices]}


def logprobs() -> Any:
    reply = litellm.completion(model=MODEL, messages=[{"role": "user", "content": SHORT}], logprobs=True)
    choice = reply.choices[0]
    return {
        "logprobs": [entry.logprob for entry in choice.logprobs.content],
        "texts": [choice.message.content],
    }


def required_tool() -> Any:
    message = ask([{"role": "user", "content": FORCED}], tools=CHAT_TOOLS, tool_choice="required")
    return {"called": [each.function.name for each in message.tool_calls]}


def structured() -> Any:
    schema = {"name": "city", "schema": LIMA_SCHEMA, "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    return {"texts": [ask([{"role": "user", "content": OBJECT}], response_format=response_format).content]}


def retry() -> Any:
    return {"texts": [ask([{"role": "user", "content": SHORT}], num_retries=2).content]}


if __name__ == "__main__":
    serve(*conversations(agent), samples, logprobs, required_tool, structured, retry)
