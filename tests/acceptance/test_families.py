"""Every family of `model_families`, through the whole engine: what its table says is what the engine does.

The prompts are shorter than a window, and three windows long.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
import transformers

from model_families import CONTEXT, FAMILIES, Family
from small_models import sft_datum
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.losses import CHOSEN_EXPERTS
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import EngineError
from tinkerscript.rollouts.trainers import packed_experts

PROMPTS = [[5, 6, 7], [2 + (7 * i) % 61 for i in range(48)]]
REPLY = 20


@pytest.fixture
def folder(family: Family, random_model: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    if "text_config" in family.settings:
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_config(family.config)
    for weight in model.parameters():
        weight.data *= family.scale if weight.dim() > 1 else 1
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(random_model / name, tmp_path / "model")
    return tmp_path / "model"


def gap(engine: EmbeddedEngine, training: EmbeddedTrainingClient) -> np.ndarray:
    """|sampler - trainer| in nats, of each token of two replies to each of `PROMPTS`, and of a reply to what
    follows each of those, which goes on from kept keys, values and states."""
    client = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=REPLY, stop=[])
    prompts, replies = PROMPTS, []
    for samples in (2, 1):
        futures = [client.sample(tinker.ModelInput.from_ints(prompt), samples, params) for prompt in prompts]
        replies += [
            (prompt, sequence)
            for prompt, future in zip(prompts, futures, strict=True)
            for sequence in future.result().sequences
        ]
        prompts = [[*prompt, *sequence.tokens, 8] for prompt, sequence in replies]
    output = training.forward([sft_datum(prompt + each.tokens) for prompt, each in replies], "cross_entropy")
    return np.abs(
        [
            np.array(each.logprobs) - result["logprobs"].to_numpy()[-REPLY:]
            for (_, each), result in zip(replies, output.result().loss_fn_outputs, strict=True)
        ]
    )


def each_family(families: list[Family], *, in_ci: Iterable[Family] = FAMILIES) -> pytest.MarkDecorator:
    """A test of every one of `families`; of those that are not `in_ci`, with the mark `long`."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(each, id=each.name, marks=[] if each in in_ci else [pytest.mark.long])
            for each in families
        ],
    )


@each_family(FAMILIES)
def test_the_sampler_is_the_trainer_before_and_after_a_step_of_a_lora(
    family: Family, folder: Path, tmp_path: Path
) -> None:
    lora = LoraSettings(4, targets=family.targets)
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, lora=lora) as engine:
        assert engine.max_context == CONTEXT
        assert engine.shares_prefixes == family.shares
        assert engine.is_fused == family.is_fused
        training = engine.create_training_client()
        assert gap(engine, training).max() < 1e-5
        data = [sft_datum(prompt) for prompt in PROMPTS]
        before = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        assert training.forward(data, "cross_entropy").result().metrics["loss:sum"] < before - 1
        assert gap(engine, training).max() < 1e-5


@each_family([family for family in FAMILIES if family.is_mixture])
def test_what_a_mixture_chose_is_replayed(family: Family, folder: Path, tmp_path: Path) -> None:
    if not family.replays:
        with pytest.raises(EngineError, match=r"engine\.routing_replay: .* leave it out"):
            EmbeddedEngine(folder, checkpoint_dir=tmp_path, routing_replay=True)
        return
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, routing_replay=True) as engine:
        assert engine.routing is not None
        training = engine.create_training_client()
        client = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=REPLY, stop=[])
        for prompt in PROMPTS:
            for row in client.sample_rows(prompt, 2, params).result():
                experts = np.frombuffer(row.experts, np.uint8).reshape(len(prompt) + REPLY, -1)
                own = sft_datum([*prompt, *row.ids])
                first: tuple[np.ndarray, ...] = ()
                for chosen in (experts, (experts + 1) % engine.routing.experts):
                    inputs = {CHOSEN_EXPERTS: tinker.TensorData.from_numpy(packed_experts(chosen[1:]))}
                    data = tinker.Datum(
                        model_input=own.model_input, loss_fn_inputs={**own.loss_fn_inputs, **inputs}
                    )
                    (found,) = training.forward([data], "cross_entropy").result().loss_fn_outputs
                    first = (*first, found["logprobs"].to_numpy()[-REPLY:])
                assert np.abs(first[0] - row.logprobs).max() < 1e-5
                assert np.abs(first[1] - row.logprobs).max() > 1e-3


OF_EACH_KIND = {(each.is_fused, each.is_mixture, each.kinds): each for each in FAMILIES}.values()
"""One of the families that have the same kinds of layers."""


@each_family(FAMILIES, in_ci=OF_EACH_KIND)
def test_bfloat16_diverges_by_rounding_alone(family: Family, folder: Path, tmp_path: Path) -> None:
    lora = LoraSettings(4, targets=family.targets)
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, dtype="bfloat16", lora=lora) as engine:
        assert gap(engine, engine.create_training_client()).mean() < 0.02
