"""`anthropic`, Messages: an agent loop that sends all blocks back."""

from __future__ import annotations

from typing import Any

import anthropic
from features import conversations, refusals, serve
from travel import CONVERSATION, FORCED, LIMA_SCHEMA, OBJECT, SCHEMAS, SHORT, SYSTEM, call

MODEL = "policy"
TOOLS: list[Any] = [
    {"name": name, "description": name.replace("_", " "), "input_schema": schema}
    for name, schema in SCHEMAS.items()
]


def ask(client: anthropic.Anthropic, messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    options = {"model": MODEL, "max_tokens": 4000, "messages": messages} | options
    if not stream:
        return client.messages.create(**options)
    with client.messages.stream(**options) as events:
        for _ in events:
            pass
        return events.get_final_message()


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def agent(questions: tuple[str, ...], *, stream: bool, **options: Any) -> dict[str, Any]:
    client = anthropic.Anthropic()
    messages: list[Any] = []
    texts: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            reply = ask(client, messages, stream=stream, system=SYSTEM, tools=TOOLS, **options)
            messages.append({"role": "assistant", "content": reply.content})
            if reply.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": call(block.name, block.input)}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        texts.append(text_of(reply))
    return {"texts": texts}


def thinking() -> Any:
    return agent(CONVERSATION, stream=True, thinking={"type": "enabled", "budget_tokens": 1024})


def required_tool() -> Any:
    messages = [{"role": "user", "content": FORCED}]
    reply = ask(anthropic.Anthropic(), messages, tools=TOOLS, tool_choice={"type": "any"})
    return {"called": [block.name for block in reply.content if block.type == "tool_use"]}


def structured() -> Any:
    output_config = {"format": {"type": "json_schema", "schema": LIMA_SCHEMA}}
    messages = [{"role": "user", "content": OBJECT}]
    return {"texts": [text_of(ask(anthropic.Anthropic(), messages, output_config=output_config))]}


def hang_up() -> Any:
    """Leave a stream after its first words, then ask again."""
    client = anthropic.Anthropic()
    said: list[Any] = [{"role": "user", "content": SHORT}]
    with client.messages.stream(model=MODEL, max_tokens=4000, messages=said) as events:
        next(iter(events.text_stream))
    return {"texts": [text_of(ask(client, said))]}


def refused() -> Any:
    client = anthropic.Anthropic()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    said = [{"role": "user", "content": SHORT}]
    begun = [*said, {"role": "assistant", "content": "Bl"}]
    asked = {
        "an image": lambda: ask(client, [{"role": "user", "content": [image]}]),
        "the answer begun (prefill)": lambda: ask(client, begun),
        "a server's tool (web_search)": lambda: ask(
            client, said, tools=[{"type": "web_search_20250305", "name": "web_search"}]
        ),
        "`service_tier` in `extra_body`": lambda: ask(client, said, extra_body={"service_tier": "flex"}),
        "an unknown field": lambda: ask(client, said, extra_body={"color": "blue"}),
    }
    return refusals(asked)


if __name__ == "__main__":
    serve(*conversations(agent), thinking, required_tool, structured, hang_up, refused)
