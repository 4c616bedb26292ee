"""A teacher for tests of distillation: the tiny model after it was shown sums and their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tinker

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.model_folder import TINY_MODEL


def taught_sums(folder: Path, *, steps: int = 12) -> Path:
    """The folder of its checkpoint, in `folder`."""
    renderer = ChatRenderer(TINY_MODEL)
    random = np.random.default_rng(0)
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=folder) as engine:
        client = engine.create_training_client()
        for _ in range(steps):
            data = [_lesson(renderer, *map(int, random.integers(0, 100, 2))) for _ in range(64)]
            client.forward_backward(data, "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=3e-4, grad_clip_norm=0.3)).result()
        return Path(client.save_state("teacher").result().path)


def _lesson(renderer: ChatRenderer, a: int, b: int) -> tinker.Datum:
    prompt = renderer.render([{"role": "user", "content": f"What is {a}+{b}?"}], [])
    reply = renderer.tokenizer.encode(f"{a + b}<|im_end|>")
    ids = [*prompt, *reply]
    weights = np.zeros(len(ids) - 1, np.float32)
    weights[len(prompt) - 1 :] = 1 / 64
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(ids[1:], np.int64)),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )
