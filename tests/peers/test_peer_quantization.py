"""A base in nf4 under an adapter, beside QLoRA as transformers, bitsandbytes and PEFT compute it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from bitsandbytes.nn import Linear4bit, Params4bit  # pyright: ignore[reportMissingImports]
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from small_models import sft_datum, small_model
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.quantization import QuantizedLinear
from tinkerscript.engine.weights import LoraSettings

LORA = LoraSettings(4, alpha=8.0, seed=5)
ADAM = tinker.AdamParams(learning_rate=0.02)
ROWS = [np.random.default_rng(seed).integers(2, 64, 6 + seed) for seed in range(4)]
DATA = [sft_datum(row) for row in ROWS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_computes_as_bitsandbytes_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 80, dtype=dtype)
    theirs: Any = Linear4bit(192, 80, compute_dtype=dtype, quant_type="nf4", compress_statistics=False)
    theirs.weight = Params4bit(
        linear.weight.data.clone(), requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    theirs.bias = linear.bias
    theirs = theirs.to("cpu")
    ours = QuantizedLinear(linear, "nf4", torch.device("cpu"))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in (ours, theirs):
        x = torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = module(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    assert ours.weight.nbytes == 192 * 80 // 2


def test_training_is_qlora(random_model: Path, tmp_path: Path) -> None:
    # bitsandbytes' kernels for processors take whole blocks.
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32}
    small_model("Qwen3", **shape, initializer_range=0.3).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(random_model / name, tmp_path / "model")
    folder = tmp_path / "model"
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, lora=LORA, quantization="nf4") as engine:
        assert not engine.is_fused
        client = engine.create_training_client()
        losses: list[float] = []
        for _ in range(6):
            losses.append(client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(ADAM).result()
        assert losses[-1] < 0.9 * losses[0]
        adapter = client.save_state("one").result().path
        output = client.forward_backward(DATA, "cross_entropy").result()
        stepped = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics or {}
        sampler = client.save_weights_and_get_sampling_client().result()
        sampled = [
            sampler.compute_logprobs(tinker.ModelInput.from_ints(row.tolist())).result()[1:] for row in ROWS
        ]
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    model.train()  # In inference, it rounds the blocks' scales to bfloat16.
    for row, trained, drawn in zip(ROWS, output.loss_fn_outputs, sampled, strict=True):
        ids = torch.from_numpy(row)[None]
        wanted = model(input_ids=ids).logits[0, :-1].log_softmax(-1)[range(len(row) - 1), row[1:]]
        np.testing.assert_allclose(trained["logprobs"].to_numpy(), wanted.detach(), atol=1e-5)
        np.testing.assert_allclose(np.array(drawn, np.float32), wanted.detach(), atol=1e-5)
        (-wanted.sum()).backward()
    squares = [each.grad.square().sum() for each in model.parameters() if each.grad is not None]
    assert stepped["grad_norm"] == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-4)
