"""A base in 8 bits under an adapter: what it computes, trains and holds. `tests/peers` has 4 bits."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine_helpers import own_logprobs
from small_models import sft_datum, small_model
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.lora import expert_weights
from tinkerscript.engine.memory import Workload, peak_memory
from tinkerscript.engine.quantization import QuantizedLinear, is_quantized, linear_modules
from tinkerscript.engine.weights import LoraSettings, load_model
from tinkerscript.errors import EngineError

LORA = LoraSettings(4, alpha=8.0, seed=5)
ADAM = tinker.AdamParams(learning_rate=0.02)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
ROWS = [np.random.default_rng(seed).integers(2, 64, 6 + seed) for seed in range(4)]
DATA = [sft_datum(row) for row in ROWS]


@pytest.fixture
def engine(random_model: Path, tmp_path: Path) -> Generator[EmbeddedEngine]:
    folder = tmp_path / "checkpoints"
    with EmbeddedEngine(random_model, checkpoint_dir=folder, lora=LORA, quantization="int8") as engine:
        yield engine


def rounded(weight: Tensor) -> Tensor:
    """Each output's weights as whole multiples of 1/127 of the largest."""
    step = weight.abs().max(dim=1).values[:, None] / 127
    return torch.round(weight / step) * step


def reference(folder: Path) -> Any:
    """PEFT over transformers' own model, with the weights that 8 bits hold."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            module.weight.data = rounded(module.weight.data)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=LAYERS, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def trained_logprobs(client: Any) -> list[np.ndarray]:
    outputs = client.forward(DATA, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_numpy() for output in outputs]


def test_it_computes_with_the_rounded_weights(engine: EmbeddedEngine, random_model: Path) -> None:
    model, plain = reference(random_model), load_model(random_model)
    for row, found in zip(ROWS, trained_logprobs(engine.create_training_client()), strict=True):
        np.testing.assert_allclose(found, own_logprobs(model, row), atol=1e-5)
        assert (found - own_logprobs(plain, row)).max() > 1e-3


def test_its_gradient_is_pefts(engine: EmbeddedEngine, random_model: Path) -> None:
    """Through two layers and back: the norm of all adapters' gradients."""
    client = engine.create_training_client()
    client.forward_backward(DATA, "cross_entropy").result()
    client.optim_step(ADAM).result()
    adapter = client.save_state("one").result().path
    client.forward_backward(DATA, "cross_entropy").result()
    stepped = client.optim_step(ADAM).result().metrics or {}
    model = reference(random_model)
    model.load_adapter(adapter, "one", is_trainable=True)
    model.set_adapter("one")
    for row in ROWS:
        ids = torch.from_numpy(row)[None]
        loss = -model(input_ids=ids).logits[0, :-1].log_softmax(-1)[range(len(row) - 1), row[1:]].sum()
        loss.backward()
    squares = [each.grad.square().sum() for each in model.parameters() if each.grad is not None]
    assert len(squares) == 2 * (7 * 2 + 1)
    assert stepped["grad_norm"] == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-5)


def test_sampler_and_trainer_agree_while_it_learns(engine: EmbeddedEngine) -> None:
    client = engine.create_training_client()
    losses: list[float] = []
    for _ in range(12):
        losses.append(client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(ADAM).result()
    assert losses[-1] < 0.7 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    for row, trained in zip(ROWS, trained_logprobs(client), strict=True):
        sampled = sampler.compute_logprobs(tinker.ModelInput.from_ints(row.tolist())).result()[1:]
        np.testing.assert_allclose(np.array(sampled, np.float32), trained, atol=1e-5)


def test_it_holds_what_the_formula_says(random_model: Path) -> None:
    model = load_model(random_model, quantization="int8")
    assert is_quantized(model)
    quantized = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    assert len(quantized) == 14
    held = sum(each.nbytes for each in model.parameters())
    held += sum(each.weight.nbytes for each in quantized)
    config = AutoConfig.from_pretrained(random_model)
    work = Workload(64, 64, quantization="int8")
    said = peak_memory(config, LORA, torch.float32, work).weights
    tables = peak_memory(config, LORA, torch.float32, Workload(64, 64)).weights
    tables -= sum(each.nbytes for each in load_model(random_model).parameters())
    assert said - tables == held


def test_head_experts_and_routers_keep_their_precision() -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = small_model("Qwen3Moe", num_key_value_heads=2, **shape)
    kinds = {path.rpartition(".")[2] for path in linear_modules(model)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert expert_weights(model, ["mlp"])


def test_a_model_without_linear_modules_is_refused(tmp_path: Path) -> None:
    small_model("GPT2", n_embd=32, n_layer=1, n_head=4, n_positions=32).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="a model of type 'gpt2' has no linear modules to quantize"):
        load_model(tmp_path, quantization="int8")


def test_four_bits_name_the_package_that_they_need(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(EngineError, match=r"pip install 'tinkerscript\[quantized\]', or set int8"):
        load_model(random_model, quantization="nf4")
