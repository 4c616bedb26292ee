"""`openai`, chat completions: an agent loop over the plain client, synchronous."""

from __future__ import annotations

from typing import Any

import openai
from chat import SAID, chat_features
from features import refusals, serve

MODEL = "policy"


def create(messages: list[Any], **options: Any) -> Any:
    return openai.OpenAI().chat.completions.create(model=MODEL, messages=messages, **options)


def ask(messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    """The assistant's message."""
    if not stream:
        return create(messages, **options).choices[0].message
    completions = openai.OpenAI().chat.completions
    with completions.stream(model=MODEL, messages=messages, **options) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message


def hang_up() -> Any:
    """Leave a stream after its first words, then ask again."""
    with create(SAID, stream=True) as chunks:
        next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
    return {"texts": [ask(SAID).content]}


def refused() -> Any:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    asked = {
        "an image": lambda: ask([{"role": "user", "content": [image]}]),
        "`frequency_penalty`": lambda: ask(SAID, frequency_penalty=0.5),
        "`logit_bias`": lambda: ask(SAID, logit_bias={"5": 10}),
        "`reasoning_effort`": lambda: ask(SAID, reasoning_effort="low"),
        "`service_tier` priority": lambda: ask(SAID, service_tier="priority"),
        "audio": lambda: ask(SAID, modalities=["audio"], audio={"voice": "a", "format": "wav"}),
        "web search": lambda: ask(SAID, web_search_options={}),
        "an unknown field": lambda: ask(SAID, extra_body={"color": "blue"}),
    }
    return refusals(asked)


if __name__ == "__main__":
    features = chat_features(create, ask, extra_body={"return_token_ids": True})
    serve(*features, hang_up, refused)
