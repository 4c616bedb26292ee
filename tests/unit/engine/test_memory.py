"""What training holds: chunks of logits, a layer's activations, no mask of a long row. Results are equal."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from live_bytes import LiveBytes, TrainingSteps, make_fake, qwen3, sampling_peak, tensors_of, weights_of
from small_models import sft_datum, small_model
from tinkerscript.engine import decoder, packing
from tinkerscript.engine.decoder import FusedDecoder, HubDecoder
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.lora import LoraBase
from tinkerscript.engine.losses import _LogprobsAndEntropies, target_logprobs
from tinkerscript.engine.memory import Workload, peak_memory
from tinkerscript.engine.packing import Packed, attend_in_segments, pack, token_trees
from tinkerscript.engine.sampling import score_prompt
from tinkerscript.engine.training import AllWeights, Trainer
from tinkerscript.engine.weights import LoraSettings, checkpoint_activations, load_model
from tinkerscript.errors import EngineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

QWEN3: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}


def model_of(name: str, **settings: Any) -> Any:
    return small_model(name, **({"max_position_embeddings": 128, "initializer_range": 0.3} | settings))


def group(*, branches: int = 3, prompt: int = 20) -> list[np.ndarray]:
    """Sequences that branch after their prompt, and again."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 64, prompt)
    found: list[np.ndarray] = []
    for _ in range(branches):
        turn = np.concatenate([stem, rng.integers(0, 64, 5)])
        found += [np.concatenate([turn, rng.integers(0, 64, 9 + more)]) for more in range(2)]
    return found


def shared_row(model: Any) -> Packed:
    return pack(token_trees(group(), pair_cost=0.0, budget=10**6), model)


def targets_of(packed: Packed) -> tuple[Tensor, Tensor]:
    """Targets (S,) and a weight for each."""
    generator = torch.Generator().manual_seed(1)
    count = len(packed.places)
    return torch.randint(64, (count,), generator=generator), torch.randn(count, generator=generator)


def gradients(model: Any, logprobs: Tensor, weights: Tensor) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((logprobs * weights).sum(), trained))


def same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


class Sizes(TorchDispatchMode):
    """The most entries of a tensor that an operation makes, by dtype. Views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in [] if func.is_view else tree_leaves(result):
            if isinstance(each, Tensor):
                self.most[each.dtype] = max(self.most.get(each.dtype, 0), each.numel())
        return result


CHUNKED: list[tuple[str, dict[str, Any], LoraSettings | None]] = [
    ("Qwen3", QWEN3, None),
    ("Qwen3", {"tie_word_embeddings": True, **QWEN3}, LoraSettings(4, targets=("attn", "unembed"))),
    ("Gemma2", {"final_logit_softcapping": 3.0, **QWEN3}, None),
    ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}, None),
]


@pytest.mark.parametrize(("name", "settings", "lora"), CHUNKED, ids=[f"{n}-{s}" for n, _, s in CHUNKED])
def test_logits_in_chunks_give_the_same_logprobs_and_gradients(
    name: str, settings: dict[str, Any], lora: LoraSettings | None, tmp_path: Path
) -> None:
    model = model_of(name, **settings)
    if lora is not None:
        adapter = LoraBase(model, tmp_path, HubDecoder).new_adapter(lora)
        torch.manual_seed(1)
        for parameter in adapter.parameters:
            torch.nn.init.normal_(parameter, std=0.1)
    packed = shared_row(model)
    targets, weights = targets_of(packed)
    logits = model(**packed.inputs).logits.flatten(0, 1)
    expected = logits.log_softmax(-1)[packed.places, targets]
    before = gradients(model, expected, weights)
    batch = (model, packed.inputs, packed.places, targets)
    entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()[packed.places]
    both = torch.stack([expected.detach(), entropies])
    for rows in (None, 7, 1):
        logprobs = target_logprobs(*batch, rows=rows)
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-6)
        same(gradients(model, logprobs, weights), before, 1e-5)
        with torch.no_grad():
            found = target_logprobs(*batch, rows=rows, entropy_gradients=True)
        torch.testing.assert_close(found, both, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("rows", "temperature"), [(None, 1.0), (7, 1.0), (7, 0.6)])
def test_entropies_have_their_gradients_in_chunks_too(rows: int | None, temperature: float) -> None:
    """In float64, against torch's own entropy; half of the vocabulary cannot be sampled."""
    model = model_of("Qwen3", **QWEN3).double()
    packed = shared_row(model)
    targets, weights = targets_of(packed)
    logits = model(**packed.inputs).logits.flatten(0, 1) / temperature
    entropies = torch.distributions.Categorical(logits=logits).entropy()[packed.places]
    expected = torch.stack([logits.log_softmax(-1)[packed.places, targets], entropies])
    both = torch.stack([weights, weights.flip(0)])
    settings: dict[str, Any] = {"temperatures": np.full(len(targets), temperature, np.float32), "rows": rows}
    settings["entropy_gradients"] = True
    found = target_logprobs(model, packed.inputs, packed.places, targets, **settings)
    tolerance = 1e-6 if temperature != 1 else 1e-10  # Temperatures are float32.
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    same(gradients(model, found, both), gradients(model, expected, both), tolerance)


def test_a_token_of_probability_0_leaves_the_gradient_of_the_entropy_finite() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 1.0, -200.0]], requires_grad=True)
    place = torch.tensor([0])
    found = _LogprobsAndEntropies.apply(logits, None, place, torch.tensor([2]))
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, [1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [FusedDecoder, HubDecoder])
def test_a_prompt_is_scored_in_chunks(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kind(model_of("Qwen3", vocab_size=1000, **QWEN3))
    ids = np.random.default_rng(0).integers(0, 64, 40).tolist()
    chosen = (np.array([0, 20, 38, 3]), np.array([1, 2, 3, 4]))
    for last in (None, 13):
        expected = score_prompt(made, ids, last=last, top=3, chosen=chosen)
        with monkeypatch.context() as small, Sizes() as sizes:
            small.setattr(decoder, "LOGITS_ENTRIES", 1000 * 11)
            found = score_prompt(made, ids, last=last, top=3, chosen=chosen)
        assert sizes.most[torch.float32] == 11 * 1000
        for name in ("logprobs", "top_ids", "top_logprobs", "chosen"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


def test_checkpointed_layers_are_computed_twice_and_decoded_once(random_model: Path) -> None:
    calls = 0

    def count(module: torch.nn.Module, _: Any) -> None:
        nonlocal calls
        calls += type(module).__name__ == "Qwen3MLP"

    data = [datum(group()[0])]
    with EmbeddedEngine(random_model, activation_checkpointing=True, lora=LoraSettings(2)) as engine:
        client = engine.create_training_client()
        hook = register_module_forward_pre_hook(count)
        client.forward(data, "cross_entropy").result()
        layers, calls = calls, 0
        client.forward_backward(data, "cross_entropy").result()
        hook.remove()
    assert calls == 2 * layers > 0


def test_a_model_without_layers_to_checkpoint_is_refused() -> None:
    model = model_of("Qwen3", **QWEN3)
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(EngineError, match=r"activation_checkpointing: qwen3 .* set it to false"):
        checkpoint_activations(model)


def datum(ids: np.ndarray) -> tinker.Datum:
    """Cross entropy with a random weight at each position."""
    data = sft_datum(ids)
    weights = np.random.default_rng(len(ids)).normal(size=len(ids) - 1).astype(np.float32)
    data.loss_fn_inputs["weights"] = tinker.TensorData.from_numpy(weights)
    return data


SEGMENTED: list[tuple[str, dict[str, Any], torch.dtype, float]] = [
    ("GPT2", {**GPT2, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}, torch.float64, 1e-10),
    ("Qwen3", QWEN3, torch.float32, 1e-5),
]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(
    ("name", "settings", "dtype", "tolerance"), SEGMENTED, ids=[name for name, *_ in SEGMENTED]
)
def test_long_rows_and_checkpointed_layers_have_equal_results(
    name: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
    checkpoints: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows attend by segments. Hugging Face's own way of checkpointing, in training mode, would turn GPT-2's
    dropout on."""
    plain = model_of(name, **settings).to(dtype)
    shared = copy.deepcopy(plain)
    assert attend_in_segments(shared)
    if checkpoints:
        checkpoint_activations(shared)
    data = [datum(ids) for ids in [*group(), *group(branches=1, prompt=7)]]
    one = Trainer(AllWeights(plain)).forward_backward(data, "cross_entropy", None, backward=True)
    monkeypatch.setattr(packing, "MASKED_TOKENS", 0)  # Every row with branches is long.
    monkeypatch.setattr(packing, "QUERY_BLOCK", 4)
    trainer = Trainer(AllWeights(shared), share_prefixes=True)
    other = trainer.forward_backward(data, "cross_entropy", None, backward=True)
    assert other.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
    outputs = zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True)
    for row, again in ((each["logprobs"].to_numpy() for each in pair) for pair in outputs):
        np.testing.assert_allclose(again, row, rtol=1e-6, atol=5e-6)
    same([p.grad for p in shared.parameters()], [p.grad for p in plain.parameters()], tolerance)


def answers_to(prompt: int, *, number: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 64, prompt)
    return [np.concatenate([stem, rng.integers(0, 64, length)]) for _ in range(number)]


def test_a_long_row_holds_no_matrix_of_its_pairs() -> None:
    model = model_of("Qwen3", num_hidden_layers=1, max_position_embeddings=4096, **QWEN3)
    assert attend_in_segments(model)
    sequences = answers_to(2048, number=2, length=1024)
    (tree,) = token_trees(sequences, pair_cost=1e-6, budget=4096, segments=True)
    assert tree.size >= 4095
    packed = pack([tree], model, segments=True)
    targets = torch.from_numpy(packed.places % 64)
    with Sizes() as sizes:
        target_logprobs(model, packed.inputs, packed.places, targets).sum().backward()
    assert max(sizes.most.values()) <= packing.QUERY_BLOCK * 3072


def test_rows_of_a_model_that_takes_segments_are_not_bounded_by_a_mask() -> None:
    sequences = answers_to(12_000, number=3, length=6000)
    masked = token_trees(sequences, pair_cost=1e-6, budget=4096)
    (tree,) = token_trees(sequences, pair_cost=1e-6, budget=4096, segments=True)
    assert [each.size for each in masked] == [18_000] * 3
    assert tree.size >= 30_000 - 6


LORA = LoraSettings(8)
KINDS: list[tuple[LoraSettings | None, torch.dtype, bool, int]] = [
    (LORA, torch.float32, False, 1024),
    (LORA, torch.bfloat16, True, 96),
    (None, torch.float32, True, 96),
    (None, torch.bfloat16, False, 1024),
]


@pytest.mark.parametrize(("lora", "dtype", "checkpointing", "rows"), KINDS)
def test_the_peak_of_training_is_within_15_percent_of_the_formula(
    lora: LoraSettings | None, dtype: torch.dtype, checkpointing: bool, rows: int
) -> None:
    """So no more logits than a chunk are held. Entropies take at most 15 percent more."""
    config = qwen3(4000, 160, 480, 2, 5, 1, 32, max_position_embeddings=128, tie_word_embeddings=rows > 96)
    work: dict[str, Any] = {"tokens": 768, "length": 128, "logits_rows": rows}
    work["autocast"] = lora is None and dtype == torch.bfloat16
    held = 0
    peaks: list[int] = []
    for entropies in (False, True):
        weights = weights_of(config, lora, dtype, checkpointing=checkpointing, device="meta")
        with FakeTensorMode(allow_non_fake_inputs=True):
            make_fake(weights)
            live = LiveBytes(*tensors_of(weights))
            held = live.now
            peaks.append(TrainingSteps(weights, entropies=entropies, **work).peak(live))
    memory = peak_memory(config, lora, dtype, Workload(768, rows, checkpointing))
    tables = 2 * dtype.itemsize * 128 * 32
    trained = memory.gradients // 4
    assert held == pytest.approx(memory.weights - tables + (4 * trained if lora else 0), rel=0.01)
    assert memory.training - tables == pytest.approx(peaks[0], rel=0.15)
    assert memory.moments == 2 * memory.gradients
    assert peaks[1] <= 1.15 * peaks[0]


@pytest.mark.parametrize("lora", [LORA, None])
def test_the_peak_of_sampling_is_within_10_percent_of_the_formula(lora: LoraSettings | None) -> None:
    config = qwen3(500, 64, 192, 2, 4, 2, 16, max_position_embeddings=1100)
    weights = weights_of(config, lora, torch.float32, checkpointing=False, device="cpu")
    work = Workload(1, 1, samplers=1, rows=16, prompt=1024, length=1030)
    memory = peak_memory(config, lora, torch.float32, work)
    measured = sampling_peak(
        weights, torch.float32, rows=16, prompt=1024, length=1030, budget=memory.kv_cache
    )
    assert memory.sampling == pytest.approx(measured, rel=0.1)
    assert memory.kv_cache > memory.decoding / 4


def test_weights_gradients_and_moments_of_other_architectures_are_counted_exactly() -> None:
    model = model_of("GPT2", **GPT2)
    size = 4 * sum(each.numel() for each in model.parameters())
    memory = peak_memory(model.config, None, torch.float32, Workload(64, 64))
    assert (memory.weights, memory.gradients, memory.moments) == (size, size, 2 * size)
    assert memory.total == memory.training
    lora = LoraSettings(2, targets=("c_attn",))
    adapters = peak_memory(model.config, lora, torch.float32, Workload(64, 64))
    assert adapters.adapters == 4 * 2 * 2 * (32 + 96)


def test_a_frozen_base_in_bfloat16_is_loaded_without_a_copy_in_float32(random_model: Path) -> None:
    """Weights are mapped from the file where they are in its dtype, and converted one by one where not."""
    load_model(random_model, dtype=torch.bfloat16).save_pretrained(half := random_model.parent / "half")
    sizes = Sizes()
    with sizes:
        model = load_model(half, dtype=torch.bfloat16)
        LoraBase(model.requires_grad_(False), half, decoder.decoder_for(model, frozen=True))
    largest = max(each.numel() for each in model.parameters())
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert sizes.most.get(torch.float32, 0) < largest
