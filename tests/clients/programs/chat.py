"""An agent loop over chat completions, and single requests, for libraries that reply as `openai` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from features import Feature, conversations
from travel import CHAT_TOOLS, FORCED, LIMA_SCHEMA, OBJECT, SHORT, SYSTEM, call

Ask = Callable[..., Any]
"""(messages, stream=False, **options) -> the assistant's message."""

SAID: list[Any] = [{"role": "user", "content": SHORT}]


def chat_features(create: Callable[..., Any], ask: Ask, **for_ids: Any) -> tuple[Feature, ...]:
    """`create` replies to (messages, **options). `for_ids`: options for a reply that has token ids."""

    def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        texts: list[str] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            message = ask(messages, stream=stream, tools=CHAT_TOOLS)
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            while message.tool_calls:
                for each in message.tool_calls:
                    result = call(each.function.name, each.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
                message = ask(messages, stream=stream, tools=CHAT_TOOLS)
                messages.append(message)
            texts.append(message.content)
        return {"texts": texts}

    def samples() -> Any:
        return {"texts": [choice.message.content for choice in create(SAID, n=3).choices]}

    def logprobs() -> Any:
        choice = create(SAID, logprobs=True, **for_ids).choices[0]
        ids = {"ids": choice.token_ids} if for_ids else {}
        told = [entry.logprob for entry in choice.logprobs.content]
        return {"logprobs": told, "texts": [choice.message.content], **ids}

    def required_tool() -> Any:
        message = ask([{"role": "user", "content": FORCED}], tools=CHAT_TOOLS, tool_choice="required")
        return {"called": [each.function.name for each in message.tool_calls]}

    def structured() -> Any:
        schema = {"name": "city", "schema": LIMA_SCHEMA, "strict": True}
        response_format = {"type": "json_schema", "json_schema": schema}
        return {
            "texts": [ask([{"role": "user", "content": OBJECT}], response_format=response_format).content]
        }

    return (*conversations(agent), samples, logprobs, required_tool, structured)
