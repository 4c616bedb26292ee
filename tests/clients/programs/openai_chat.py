"""`openai`, chat completions: an agent loop over the plain client, synchronous."""

from __future__ import annotations

from typing import Any

import openai
from features import conversations, refusals, serve
from travel import CHAT_TOOLS, FORCED, LIMA_SCHEMA, OBJECT, SHORT, SYSTEM, call

MODEL = "policy"


def ask(client: openai.OpenAI, messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    """The assistant's message."""
    if not stream:
        return client.chat.completions.create(model=MODEL, messages=messages, **options).choices[0].message
    with client.chat.completions.stream(model=MODEL, messages=messages, **options) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message


def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        message = ask(client, messages, stream=stream, tools=CHAT_TOOLS)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        while message.tool_calls:
            for each in message.tool_calls:
                result = call(each.function.name, each.function.arguments)
                messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
            message = ask(client, messages, stream=stream, tools=CHAT_TOOLS)
            messages.append(message)
        texts.append(message.content)
    return {"texts": texts}


def samples() -> Any:
    reply = openai.OpenAI().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": SHORT}], n=3
    )
    return {"texts": [choice.message.content for choice in reply.choices]}


def logprobs() -> Any:
    reply = openai.OpenAI().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": SHORT}],
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    return {
        "ids": choice.token_ids,
        "logprobs": [entry.logprob for entry in choice.logprobs.content],
        "texts": [choice.message.content],
    }


def required_tool() -> Any:
    messages = [{"role": "user", "content": FORCED}]
    message = ask(openai.OpenAI(), messages, tools=CHAT_TOOLS, tool_choice="required")
    return {"called": [each.function.name for each in message.tool_calls]}


def structured() -> Any:
    schema = {"name": "city", "schema": LIMA_SCHEMA, "strict": True}
    messages = [{"role": "user", "content": OBJECT}]
    response_format = {"type": "json_schema", "json_schema": schema}
    return {"texts": [ask(openai.OpenAI(), messages, response_format=response_format).content]}


def hang_up() -> Any:
    """Leave a stream after its first words, then ask again."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": SHORT}]
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True) as chunks:
        next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
    return {"texts": [ask(client, messages).content]}


def refused() -> Any:
    client = openai.OpenAI()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    said = [{"role": "user", "content": SHORT}]
    asked = {
        "an image": lambda: ask(client, [{"role": "user", "content": [image]}]),
        "`frequency_penalty`": lambda: ask(client, said, frequency_penalty=0.5),
        "`logit_bias`": lambda: ask(client, said, logit_bias={"5": 10}),
        "`reasoning_effort`": lambda: ask(client, said, reasoning_effort="low"),
        "`service_tier` priority": lambda: ask(client, said, service_tier="priority"),
        "audio": lambda: ask(client, said, modalities=["audio"], audio={"voice": "a", "format": "wav"}),
        "web search": lambda: ask(client, said, web_search_options={}),
        "an unknown field": lambda: ask(client, said, extra_body={"color": "blue"}),
    }
    return refusals(asked)


def retry() -> Any:
    messages = [{"role": "user", "content": SHORT}]
    return {"texts": [ask(openai.OpenAI(), messages).content]}


if __name__ == "__main__":
    serve(*conversations(agent), samples, logprobs, required_tool, structured, hang_up, refused, retry)
