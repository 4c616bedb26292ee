"""The engine takes a published model in bfloat16: it proves, samples, scores and trains it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings

GAP = 0.15
"""Mean difference of log probabilities that rounding makes."""
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646]


@pytest.mark.timeout(600)  # Processors without bfloat16 in hardware take half a minute.
@pytest.mark.parametrize(
    "lora", [LoraSettings(16), pytest.param(None, marks=pytest.mark.long)], ids=["LoRA", "all weights"]
)
def test_it_loads_beside_a_frozen_role_samples_and_trains_a_step(
    smollm2: Path, tmp_path: Path, lora: LoraSettings | None
) -> None:
    with EmbeddedEngine(smollm2, checkpoint_dir=tmp_path, lora=lora, dtype="bfloat16") as engine:
        assert engine.warnings == []
        training = engine.create_training_client()
        sampling = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=4, seed=1, stop=[])
        rows = sampling.sample(tinker.ModelInput.from_ints(PROMPT), 2, params).result().sequences
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints([*PROMPT, *row.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": np.array([*PROMPT[1:], *row.tokens]),
                    "weights": np.array([0.0] * (len(PROMPT) - 1) + [0.25] * 4, np.float32),
                },
            )
            for row in rows
        ]
        output = training.forward_backward(data, "cross_entropy").result()
        before = np.array([each["logprobs"].to_numpy()[-4:] for each in output.loss_fn_outputs])
        sampled = np.array([row.logprobs for row in rows])
        assert np.abs(sampled - before).mean() < GAP
        training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        output = training.forward(data, "cross_entropy").result()
        after = np.array([each["logprobs"].to_numpy()[-4:] for each in output.loss_fn_outputs])
        assert after.mean() > before.mean()
        role = engine.open_frozen(smollm2)
        texts = [np.array([*PROMPT, *row.tokens], np.int32) for row in rows]
        scores = np.array([each[-4:] for each in role.logprobs(texts).result()])
        assert np.abs(scores - sampled).mean() < GAP
