"""A published model whose chat template knows no tools: they are text in its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def test_an_agent_with_tools_is_one_sequence(smollm2: Path) -> None:
    renderer = ChatRenderer(smollm2)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "What is 12+34?"},
    ]
    prompt = renderer.render(messages, [TOOL])
    text = renderer.tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\nBe exact.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text

    said = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 12,  "b": 34}}\n</tool_call><|im_end|>'
    sampled = renderer.tokenizer.encode(said)
    reply = renderer.parse(sampled, ParseOptions(tool_calls=True, tools=[TOOL]))
    (call,) = reply["tool_calls"]
    assert (reply["content"], call["function"]["name"]) == ("I add.", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 12, "b": 34}

    result = {"role": "tool", "tool_call_id": call["id"], "content": "46"}
    new = renderer.extend(prompt, sampled, [result], [TOOL], lambda: [*messages, reply])
    assert new is not None, "the ids that were sampled stay, white space in the arguments included"
    assert renderer.tokenizer.decode(new) == (
        "\n<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
