"""The tiny model, taught by a few supervised steps to call two tools, through the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tinker

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.model_folder import TINY_MODEL
from tool_agent import ARGUMENTS, QUESTIONS, TOOLS, run_tool

STEPS = 14


async def teach_tools(folder: Path) -> Path:
    """The folder of a model that mostly calls the right tool of `tool_agent` and repeats its result."""
    datum = lesson(ChatRenderer(TINY_MODEL))
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=folder) as engine:
        client = engine.create_training_client()
        for _ in range(STEPS):
            client.forward_backward([datum], "cross_entropy")
            await client.optim_step(tinker.AdamParams(learning_rate=1e-3, beta2=0.95, grad_clip_norm=1.0))
        await client.save_state("tools")
    return folder / "tools"


def lesson(renderer: ChatRenderer) -> tinker.Datum:
    """The whole conversation as it should go; only what the assistant says has weight."""
    ids: list[int] = []
    weights: list[float] = []
    tail: list[int] = []
    said: list[int] = []
    spoken: list[dict[str, str]] = []
    stop = renderer.stop_token_ids[0]

    def take(prompt: list[int], reply: str) -> None:
        nonlocal tail, said
        tail, said = prompt, [*renderer.tokenizer.encode(reply), stop]
        ids.extend([*tail, *said])
        weights.extend([*[0.0] * len(tail), *[1.0] * len(said)])
        spoken.append({"role": "assistant", "content": reply})

    def following(message: dict[str, str]) -> list[int]:
        history = spoken.copy()
        found = renderer.extend(tail, said, [message], TOOLS, lambda: history)  # type: ignore
        assert found is not None
        spoken.append(message)
        return found

    for number, (question, (name, arguments)) in enumerate(zip(QUESTIONS, ARGUMENTS, strict=True)):
        asked = {"role": "user", "content": question}
        if number:
            prompt = following(asked)
        else:
            prompt = renderer.render([asked], TOOLS)  # type: ignore[list-item, arg-type]
            spoken.append(asked)
        call = json.dumps({"name": name, "arguments": arguments})
        take(prompt, f"<tool_call>\n{call}\n</tool_call>")
        result = run_tool(name, json.dumps(arguments))
        take(following({"role": "tool", "content": result}), result)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(ids[1:], np.int64)),
            "weights": tinker.TensorData.from_numpy(np.array(weights[1:], np.float32) / sum(weights)),
        },
    )
