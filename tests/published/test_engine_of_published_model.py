"""The engine takes a published model in both precisions: it proves, samples, scores and trains it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646]


@pytest.mark.timeout(600)  # Processors without bfloat16 in hardware take half a minute.
@pytest.mark.parametrize(
    ("dtype", "mean_gap", "lora"),
    [
        pytest.param("float32", 1e-4, LoraSettings(16), id="float32, LoRA"),
        pytest.param("bfloat16", 0.15, LoraSettings(16), id="bfloat16, LoRA"),
        pytest.param("bfloat16", 0.15, None, id="bfloat16, all weights", marks=pytest.mark.long),
    ],
)
def test_it_loads_beside_a_frozen_role_samples_and_trains_a_step(
    smollm2: Path, tmp_path: Path, dtype: str, mean_gap: float, lora: LoraSettings | None
) -> None:
    with EmbeddedEngine(smollm2, checkpoint_dir=tmp_path, lora=lora, dtype=dtype) as engine:
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
        assert np.abs(sampled - before).mean() < mean_gap
        training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        output = training.forward(data, "cross_entropy").result()
        after = np.array([each["logprobs"].to_numpy()[-4:] for each in output.loss_fn_outputs])
        assert after.mean() > before.mean()
        role = engine.open_frozen(smollm2)
        texts = [np.array([*PROMPT, *row.tokens], np.int32) for row in rows]
        scores = np.array([each[-4:] for each in role.logprobs(texts).result()])
        assert np.abs(scores - sampled).mean() < mean_gap
