"""`litellm`: an agent loop over `completion`; the provider `openai/` with the model's name."""

from __future__ import annotations

from typing import Any

import litellm
from chat import chat_features
from features import serve

MODEL = "openai/policy"


def create(messages: list[Any], **options: Any) -> Any:
    return litellm.completion(model=MODEL, messages=messages, num_retries=2, **options)


def ask(messages: list[Any], *, stream: bool = False, **options: Any) -> Any:
    reply = create(messages, stream=stream, **options)
    whole = litellm.stream_chunk_builder(list(reply), messages=messages) if stream else reply
    return whole.choices[0].message


if __name__ == "__main__":
    serve(*chat_features(create, ask))
