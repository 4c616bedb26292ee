"""LoRA adapters: they train and sample as PEFT computes, over one frozen base, and their files are PEFT's.

The base may be in 8 bits; `tests/peers` has 4 bits.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

from engine_helpers import own_logprobs, saved
from small_models import sft_datum, small_model
from tinkerscript.engine.decoder import FusedDecoder, HubDecoder
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.lora import LoraBase, expert_weights, merged, settings_of
from tinkerscript.engine.memory import Workload, peak_memory
from tinkerscript.engine.quantization import QuantizedLinear, is_quantized, linear_modules
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.engine.weights import LoraSettings, load_model
from tinkerscript.errors import ConfigError, EngineError, EngineRequestError
from tinkerscript.model_folder import ADAPTER_CONFIG

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

ADAM = tinker.AdamParams(learning_rate=0.02)
LORA = LoraSettings(4, alpha=8.0, seed=5)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


ROWS = [np.random.default_rng(seed).integers(2, 64, 6 + seed).tolist() for seed in range(4)]
DATA = [sft_datum(row) for row in ROWS]
PROMPT = tinker.ModelInput.from_ints([5, 6, 7])


@pytest.fixture
def engine(random_model: Path, tmp_path: Path) -> Generator[EmbeddedEngine]:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path / "checkpoints", lora=LORA) as engine:
        yield engine


def train(client: EmbeddedTrainingClient, steps: int) -> list[float]:
    """The losses before each step."""
    losses: list[float] = []
    for _ in range(steps):
        losses.append(client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(ADAM).result()
    return losses


def logprobs(client: EmbeddedTrainingClient) -> np.ndarray:
    outputs = client.forward(DATA, "cross_entropy").result().loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy() for output in outputs])


def sampled_logprobs(client: Any) -> np.ndarray:
    found = [client.compute_logprobs(tinker.ModelInput.from_ints(row)).result()[1:] for row in ROWS]
    return np.concatenate(found).astype(np.float32)


def reference(model: Any) -> np.ndarray:
    """The log probabilities of `DATA` by the forward pass of any model."""
    return np.concatenate([own_logprobs(model, row) for row in ROWS])


def own_loss(model: Any) -> torch.Tensor:
    """Cross entropy of `DATA`, by Hugging Face."""
    rows = [torch.tensor([row]) for row in ROWS]
    return torch.stack([model(input_ids=row, labels=row).loss * (row.numel() - 1) for row in rows]).sum()


def peft_model(folder: Path, settings: LoraSettings) -> PeftModel:
    torch.manual_seed(settings.seed)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=LAYERS)  # type: ignore[arg-type]
    return get_peft_model(load_model(folder), config)  # type: ignore[arg-type, return-value]


def test_steps_are_those_of_peft(engine: EmbeddedEngine, random_model: Path) -> None:
    theirs = peft_model(random_model, LORA)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    settings: dict[str, Any] = {"lr": ADAM.learning_rate, "betas": (ADAM.beta1, ADAM.beta2), "eps": ADAM.eps}
    optimizer = torch.optim.AdamW(trained, **settings, weight_decay=0.0)
    expected: list[float] = []
    for _ in range(3):
        loss = own_loss(theirs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    ours = engine.create_training_client()
    assert train(ours, 3) == pytest.approx(expected, rel=1e-5)
    assert logprobs(ours) == pytest.approx(reference(theirs), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen3", {"head_dim": 8, "num_key_value_heads": 2}),
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("Gemma", {"head_dim": 8, "num_key_value_heads": 2}),
    ],
)
def test_sampling_is_what_training_computes_with_fused_decoders_and_without(
    name: str, settings: dict[str, Any], random_model: Path, tmp_path: Path
) -> None:
    """For two runs over one base; a sampler keeps its weights while both train on."""
    folder = saved(small_model(name, initializer_range=0.2, **settings), tmp_path, random_model)
    with EmbeddedEngine(folder, lora=LORA) as engine:
        first = engine.create_training_client()
        second = engine.train_copy(lora=LoraSettings(2, targets=("attn",), seed=1)).result()
        plain = engine.sample_copy().result()
        start = sampled_logprobs(plain)
        assert start == pytest.approx(reference(load_model(tmp_path)), abs=1e-4)
        for client in (first, second):
            train(client, 2)
        trained = [logprobs(client) for client in (first, second)]
        samplers = [client.save_weights_and_get_sampling_client().result() for client in (first, second)]
        for client in (first, second):
            train(client, 1)
        params = tinker.SamplingParams(max_tokens=6, seed=3)
        responses = [sampler.sample(PROMPT, 2, params) for sampler in (*samplers, plain)]
        later = first.forward_backward(DATA, "cross_entropy")
        for sampler, expected in zip(samplers, trained, strict=True):
            assert sampled_logprobs(sampler) == pytest.approx(expected, abs=1e-4)
        assert sampled_logprobs(plain) == pytest.approx(start, abs=1e-6)
        later.result()
        for sampler, response in zip((*samplers, plain), responses, strict=True):
            for sequence in response.result().sequences:
                text = tinker.ModelInput.from_ints([5, 6, 7, *sequence.tokens])
                again = sampler.compute_logprobs(text).result()[3:]
                assert sequence.logprobs == pytest.approx(again, abs=1e-4)
        assert abs(trained[0] - trained[1]).max() > 0.01 < abs(trained[1] - start).max()


def bytes_of_tensors() -> int:
    """Of all storages that are alive in this process."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_runs_hold_their_base_once(random_model: Path, tmp_path: Path) -> None:
    shape = {
        **{"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
        **{"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 2},
    }
    folder = saved(small_model("Qwen3", **shape), tmp_path, random_model)
    base = sum(each.nbytes for each in load_model(folder).parameters())
    settings, before, held = LoraSettings(4), bytes_of_tensors(), list[int]()
    with EmbeddedEngine(folder, lora=settings) as engine:
        clients = [engine.create_training_client()]
        for more in (0, 3):
            clients += [engine.train_copy(lora=settings).result() for _ in range(more)]
            for client in clients:
                train(client, 1)
                client.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()
            held.append(bytes_of_tensors() - before)
        clients[0].save_to(tmp_path / "saved", optimizer=False, notes={}).result()
        adapter = (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size
    assert base < held[0] < 1.2 * base
    # A run has its adapter, AdamW's two moments, and what a sampler keeps of the adapter.
    assert (held[1] - held[0]) / 3 <= 5 * adapter < base / 8


def test_a_checkpoint_is_peft_s_and_is_loaded_by_peft_in_both_ways_and_served(
    engine: EmbeddedEngine, random_model: Path
) -> None:
    client = engine.create_training_client()
    train(client, 3)
    path = Path(client.save_state("a").result().path)
    expected = logprobs(client)
    assert sorted(json.loads((path / ADAPTER_CONFIG).read_text())["target_modules"]) == sorted(LAYERS)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(load_model(random_model), path)
        named: Any = AutoPeftModelForCausalLM.from_pretrained(path)
        ours = merged(path)
        for each in (loaded, named, ours):
            assert reference(each) == pytest.approx(expected, abs=1e-5)
        theirs = dict(loaded.merge_and_unload().named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-5)
    with EmbeddedEngine(path) as served:
        found = sampled_logprobs(served.create_sampling_client().result())
    assert found == pytest.approx(expected, abs=1e-4)


def test_peft_s_own_folder_is_taken(engine: EmbeddedEngine, random_model: Path, tmp_path: Path) -> None:
    theirs = peft_model(random_model, LORA)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    expected = reference(theirs)
    assert settings_of(tmp_path / "theirs").rank == 4
    ours = engine.train_copy(tmp_path / "theirs").result()
    assert logprobs(ours) == pytest.approx(expected, abs=1e-5)
    sampler = engine.sample_copy(tmp_path / "theirs").result()
    assert sampled_logprobs(sampler) == pytest.approx(expected, abs=1e-4)


def test_a_run_goes_on_from_its_checkpoint_with_its_moments(engine: EmbeddedEngine) -> None:
    client = engine.create_training_client()
    train(client, 2)
    path = Path(client.save_state("a").result().path)
    expected = train(client, 3)
    other = engine.train_copy(path, optimizer=True).result()
    assert train(other, 3) == pytest.approx(expected, rel=1e-5)
    client.load_state_with_optimizer(path).result()
    assert train(client, 3) == pytest.approx(expected, rel=1e-5)
    client.load_state(path).result()
    assert train(client, 3)[1:] != pytest.approx(expected[1:], rel=1e-5), "the moments start at 0"


def test_the_seed_decides_the_first_weights(random_model: Path) -> None:
    base = LoraBase(load_model(random_model), random_model, FusedDecoder)
    one, same, other = (base.new_adapter(LoraSettings(4, seed=seed)).parameters for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    assert not one[1].any(), "B starts at 0"


def test_what_cannot_have_an_adapter_is_refused_by_name(engine: EmbeddedEngine) -> None:
    for settings, message in (
        (LoraSettings(0), "rank: must be 1 to 32"),
        (LoraSettings(4, targets=("q_porj",)), "'q_porj' is not a linear module of qwen3"),
    ):
        with pytest.raises(EngineRequestError, match=message):
            engine.train_copy(lora=settings).result()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
        # The weights are the other way round.
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_adapters_of_experts_are_pefts(
    name: str, settings: dict[str, Any], random_model: Path, tmp_path: Path
) -> None:
    made = small_model(name, num_key_value_heads=2, head_dim=8, **settings)
    base = saved(made, tmp_path / "base", random_model)
    with EmbeddedEngine(base, checkpoint_dir=tmp_path, lora=LORA) as engine:
        client = engine.create_training_client()
        losses = train(client, 4)
        assert losses[-1] < losses[0] - 1
        expected = logprobs(client)
        path = Path(client.save_state("a").result().path)
        response = engine.sample_copy(path).result().sample(PROMPT, 1, tinker.SamplingParams(max_tokens=8))
        (sequence,) = response.result().sequences
        other = engine.train_copy(path).result()
        np.testing.assert_allclose(logprobs(other), expected, atol=1e-5)
    config = json.loads((path / ADAPTER_CONFIG).read_text())
    assert sorted(config["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]
    read = PeftModel.from_pretrained(load_model(base), path)
    for model in (read.eval(), merged(path)):
        np.testing.assert_allclose(reference(model), expected, atol=1e-5)
        sampled = own_logprobs(model, [*PROMPT.to_ints(), *sequence.tokens])[2:]
        np.testing.assert_allclose(sampled, sequence.logprobs, atol=1e-5)
    config["r"] = 2
    (path / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(EngineError, match="belongs to another model"):
        merged(path)


def test_checkpoints_of_other_kinds_are_refused(
    engine: EmbeddedEngine, random_model: Path, tmp_path: Path
) -> None:
    client = engine.create_training_client()
    path = Path(client.save_state("a").result().path)
    with pytest.raises(EngineError, match=r"has no adapter_config\.json"):
        client.load_state(random_model).result()
    with pytest.raises(EngineError, match=r"rank 4 and alpha 8, not 2 and 8"):
        engine.train_copy(lora=LoraSettings(2, alpha=8.0)).result().load_state(path).result()
    with pytest.raises(EngineError, match="has other targets"):
        engine.train_copy(lora=LoraSettings(4, 8.0, ("attn",))).result().load_state(path).result()
    with pytest.raises(EngineError, match="holds a LoRA adapter already"):
        EmbeddedEngine(path, lora=LORA)
    with EmbeddedEngine(random_model) as base, pytest.raises(EngineError, match="tinkerscript merge"):
        base.create_training_client().load_state(path).result()
    config = json.loads((path / ADAPTER_CONFIG).read_text())
    (path / ADAPTER_CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(EngineError, match=r"only plain LoRA"):
        engine.train_copy(path).result()
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (path / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"the base of the LoRA adapter in .* cannot be used: .*gone"):
        EmbeddedEngine(path)


def test_tied_embeddings_are_untied_where_the_head_has_an_adapter(random_model: Path, tmp_path: Path) -> None:
    model = load_model(random_model)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    saved(model, tmp_path / "tied", random_model)
    for targets, tied in ((("unembed",), False), (("attn", "mlp"), True)):
        lora = LoraSettings(4, targets=targets)
        with EmbeddedEngine(tmp_path / "tied", checkpoint_dir=tmp_path, lora=lora) as engine:
            client = engine.create_training_client()
            train(client, 2)
            client.save_state(str(tied)).result()
            expected = logprobs(client)
            sampler = client.save_weights_and_get_sampling_client().result()
            assert sampled_logprobs(sampler) == pytest.approx(expected, abs=1e-4)
        merged(tmp_path / str(tied)).save_pretrained(tmp_path / f"merged{tied}")
        again = load_model(tmp_path / f"merged{tied}")
        assert again.config.tie_word_embeddings is tied
        assert reference(again) == pytest.approx(expected, abs=1e-5)


def test_decoders_and_training_take_turns_on_a_module_tree() -> None:
    base = LoraBase(small_model("Gemma", head_dim=8, num_key_value_heads=2), Path("base"), HubDecoder)
    adapters = [base.new_adapter(LORA) for _ in range(2)]
    ids = torch.tensor([5, 6, 7, 8])

    def scores(made: Any) -> torch.Tensor:
        return torch.cat(list(made.score(ids)))

    with torch.no_grad():
        plain = scores(base.plain)
        adapters[1].exaggerate()
        decoders = [each.decoder() for each in adapters]
        expected = [scores(each) for each in decoders]
        assert not torch.equal(expected[0], expected[1])
        assert torch.equal(scores(decoders[1]), expected[1])
        adapters[0].activate()
        assert torch.equal(base.model(input_ids=ids[None]).logits[0], expected[0])
        assert torch.equal(scores(decoders[1]), expected[1])
        base.new_adapter(LoraSettings(2, targets=("attn",)))
        assert torch.equal(scores(decoders[1]), expected[1])
        assert torch.equal(scores(base.plain), plain)


# A base in 8 bits


@pytest.fixture
def quantized(random_model: Path, tmp_path: Path) -> Generator[EmbeddedEngine]:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, lora=LORA, quantization="int8") as engine:
        yield engine


def rounded_peft_model(folder: Path) -> Any:
    """PEFT over a model whose weights are whole multiples of 1/127 of the largest of their output."""
    made: Any = peft_model(folder, LORA)
    for path, module in made.named_modules():
        if path.endswith("_proj"):
            weight = module.base_layer.weight
            step = weight.data.abs().max(dim=1).values[:, None] / 127
            weight.data = torch.round(weight.data / step) * step
    return made


def test_a_quantized_base_computes_with_the_rounded_weights(
    quantized: EmbeddedEngine, random_model: Path
) -> None:
    found = logprobs(quantized.create_training_client())
    assert found == pytest.approx(reference(rounded_peft_model(random_model)), abs=1e-5)
    assert abs(found - reference(load_model(random_model))).max() > 1e-3


def test_the_gradient_through_a_quantized_base_is_pefts(
    quantized: EmbeddedEngine, random_model: Path
) -> None:
    """Through two layers and back: the norm of all adapters' gradients."""
    client = quantized.create_training_client()
    train(client, 1)
    adapter = client.save_state("one").result().path
    client.forward_backward(DATA, "cross_entropy").result()
    stepped = client.optim_step(ADAM).result().metrics or {}
    model = rounded_peft_model(random_model)
    model.load_adapter(adapter, "one", is_trainable=True)
    model.set_adapter("one")
    own_loss(model).backward()
    squares = [each.grad.square().sum() for each in model.parameters() if each.grad is not None]
    assert len(squares) == 2 * (7 * 2 + 1)
    assert stepped["grad_norm"] == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-5)


def test_sampler_and_trainer_agree_while_an_adapter_of_a_quantized_base_learns(
    quantized: EmbeddedEngine,
) -> None:
    client = quantized.create_training_client()
    losses = train(client, 12)
    assert losses[-1] < 0.7 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    assert sampled_logprobs(sampler) == pytest.approx(logprobs(client), abs=1e-5)


def test_a_quantized_base_holds_what_the_formula_says(random_model: Path) -> None:
    model = load_model(random_model, quantization="int8")
    assert is_quantized(model)
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    assert len(layers) == 14
    held = sum(each.nbytes for each in (*model.parameters(), *(layer.weight for layer in layers)))

    def said(**settings: Any) -> int:
        return peak_memory(model.config, LORA, torch.float32, Workload(64, 64, **settings)).weights

    tables = said() - sum(each.nbytes for each in load_model(random_model).parameters())
    assert said(quantization="int8") - tables == held


def test_head_experts_and_routers_keep_their_precision() -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = small_model("Qwen3Moe", num_key_value_heads=2, **shape)
    kinds = {path.rpartition(".")[2] for path in linear_modules(model)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert expert_weights(model, ["mlp"])


def test_what_cannot_be_quantized_is_refused_by_name(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model("GPT2", n_embd=32, n_layer=1, n_head=4, n_positions=32).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="a model of type 'gpt2' has no linear modules to quantize"):
        load_model(tmp_path, quantization="int8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(EngineError, match=r"pip install 'tinkerscript\[quantized\]', or set int8"):
        load_model(random_model, quantization="nf4")
