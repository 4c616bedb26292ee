"""`openai`, Responses: an agent loop that sends all items back."""

from __future__ import annotations

from typing import Any

import openai
from features import conversations, refusals, serve
from travel import FORCED, LIMA_SCHEMA, OBJECT, SCHEMAS, SHORT, SYSTEM, call

MODEL = "policy"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]


def ask(client: openai.OpenAI, items: list[Any], *, stream: bool = False, **options: Any) -> Any:
    if not stream:
        return client.responses.create(model=MODEL, input=items, **options)
    with client.responses.stream(model=MODEL, input=items, **options) as events:
        return events.get_final_response()


def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    client = openai.OpenAI()
    items: list[Any] = []
    texts: list[str] = []
    for question in questions:
        items.append({"role": "user", "content": question})
        while True:
            response = ask(client, items, stream=stream, instructions=SYSTEM, tools=TOOLS)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for each in calls:
                output = call(each.name, each.arguments)
                items.append({"type": "function_call_output", "call_id": each.call_id, "output": output})
        texts.append(response.output_text)
    return {"texts": texts}


def required_tool() -> Any:
    response = ask(
        openai.OpenAI(), [{"role": "user", "content": FORCED}], tools=TOOLS, tool_choice="required"
    )
    return {"called": [item.name for item in response.output if item.type == "function_call"]}


def structured() -> Any:
    text = {"format": {"type": "json_schema", "name": "city", "schema": LIMA_SCHEMA, "strict": True}}
    return {"texts": [ask(openai.OpenAI(), [{"role": "user", "content": OBJECT}], text=text).output_text]}


def logprobs() -> Any:
    response = ask(
        openai.OpenAI(),
        [{"role": "user", "content": SHORT}],
        include=["message.output_text.logprobs"],
        extra_body={"return_token_ids": True},
    )
    return {"ids": response.token_ids, "texts": [response.output_text]}


def hang_up() -> Any:
    """Leave a stream after its first words, then ask again."""
    client = openai.OpenAI()
    items: list[Any] = [{"role": "user", "content": SHORT}]
    with client.responses.create(model=MODEL, input=items, stream=True) as events:
        next(event for event in events if event.type == "response.output_text.delta")
    return {"texts": [ask(client, items).output_text]}


def refused() -> Any:
    client = openai.OpenAI()
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
    said = [{"role": "user", "content": SHORT}]
    asked = {
        "an image": lambda: ask(client, [{"role": "user", "content": [image]}]),
        "a server's tool (web_search)": lambda: ask(client, said, tools=[{"type": "web_search"}]),
        "`background`": lambda: ask(client, said, background=True),
        "`conversation`": lambda: ask(client, said, conversation="conv_1"),
        "`reasoning.effort`": lambda: ask(client, said, reasoning={"effort": "low"}),
        "`truncation` auto": lambda: ask(client, said, truncation="auto"),
        "`service_tier` priority": lambda: ask(client, said, service_tier="priority"),
        "an unknown field": lambda: ask(client, said, extra_body={"color": "blue"}),
    }
    return refusals(asked)


if __name__ == "__main__":
    serve(*conversations(agent), required_tool, structured, logprobs, hang_up, refused)
