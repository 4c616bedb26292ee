"""What a mixture's routers choose: recorded while sampling, replayed in training, refused if wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from engine_helpers import saved
from small_models import sft_datum, small_model
from tinkerscript.engine.decoder import HubDecoder
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.losses import CHOSEN_EXPERTS
from tinkerscript.engine.routers import routing_of
from tinkerscript.engine.routing import Routing
from tinkerscript.engine.running_batch import SampledRow
from tinkerscript.engine.training import AllWeights, EmbeddedTrainingClient, Trainer
from tinkerscript.engine.weights import LoraSettings, checkpoint_activations
from tinkerscript.errors import EngineError, EngineRequestError
from tinkerscript.rollouts.trainers import packed_experts

MIXTURE: dict[str, Any] = {
    **{"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 1},
}
PROMPTS = [[2 + (7 * i + k) % 61 for i in range(20)] for k in range(8)]
MANY_EXPERTS: dict[str, Any] = {
    **{"num_experts": 255, "num_experts_per_tok": 4, "num_hidden_layers": 8, "norm_topk_prob": True},
}
"""So many that rounding often changes the choice."""


def mixture(scale: float = 4, scale_of_experts: float = 4, **changes: Any) -> Any:
    """The scales are those of random weights, so large that other experts give other tokens."""
    model = small_model("Qwen3Moe", **MIXTURE | changes)
    model.config._experts_implementation = "eager"  # The only one for float64.
    for name, weight in model.named_parameters():
        weight.data *= 1 if weight.dim() == 1 else scale_of_experts if "experts" in name else scale
    return model


@pytest.fixture(scope="module")
def folder(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(mixture(), tmp_path_factory.mktemp("mixture"), random_model)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with EmbeddedEngine(folder, checkpoint_dir=checkpoints, routing_replay=True) as made:
        yield made


def routing_in(engine: EmbeddedEngine) -> Routing:
    assert engine.routing is not None
    return engine.routing


def experts_of(row: SampledRow, routing: Routing) -> np.ndarray:
    return np.frombuffer(row.experts, np.uint8).reshape(-1, routing.token_bytes)


def with_experts(ids: Sequence[int], experts: np.ndarray) -> tinker.Datum:
    """`experts`: [T, width], as a call records them."""
    data = sft_datum(ids)
    chosen = tinker.TensorData.from_numpy(packed_experts(experts[1:]))
    return tinker.Datum(
        model_input=data.model_input, loss_fn_inputs={**data.loss_fn_inputs, CHOSEN_EXPERTS: chosen}
    )


def logprobs(client: EmbeddedTrainingClient, data: list[tinker.Datum]) -> list[np.ndarray]:
    output = client.forward(data, "cross_entropy").result()
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]


@pytest.mark.parametrize("lora", [None, LoraSettings(4)])
def test_in_bfloat16_the_gap_falls_at_least_tenfold(
    random_model: Path, tmp_path: Path, lora: LoraSettings | None
) -> None:
    folder = saved(mixture(2, 40, **MANY_EXPERTS), tmp_path / "model", random_model)
    settings: dict[str, Any] = {"dtype": "bfloat16", "lora": lora, "routing_replay": True}
    params = tinker.SamplingParams(max_tokens=40, stop=[], seed=0)
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, **settings) as engine:
        client = engine.create_training_client()
        sampling = client.save_weights_and_get_sampling_client().result()
        futures = [(prompt, sampling.sample_rows(prompt, 2, params)) for prompt in PROMPTS]
        rows = [(prompt, row) for prompt, future in futures for row in future.result()]
        texts = [[*prompt, *row.ids] for prompt, row in rows]
        chosen = [experts_of(row, routing_in(engine)) for _, row in rows]
        own = logprobs(client, [sft_datum(ids) for ids in texts])
        replayed = logprobs(client, [with_experts(*each) for each in zip(texts, chosen, strict=True)])
    expected = np.concatenate([row.logprobs for _, row in rows])
    gaps = [
        np.abs(expected - np.concatenate([each[-40:] for each in found])).mean() for found in (own, replayed)
    ]
    assert gaps[0] > 10 * gaps[1], gaps


def own_choices(routing: Routing, model: Any, ids: Sequence[int]) -> np.ndarray:
    """[T, width]: of a plain forward pass, at the position before each token; unknown before the first."""
    with torch.no_grad(), routing.recorded(model) as found:
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return np.concatenate([routing.unknown(1), routing.packed(torch.stack(found))[:-1]])


def test_what_is_recorded_is_what_the_model_chooses(
    engine: EmbeddedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After short and long prompts, from the cache, in later turns, and when memory runs out."""
    monkeypatch.setattr("tinkerscript.engine.running_batch.PREFILL_TOKENS", 16)
    routing, model = routing_in(engine), mixture()
    client = engine.create_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=12, stop=[], seed=1)
    prompts = [[5, 6, 7], PROMPTS[0], [*PROMPTS[0], 9], [2 + i % 60 for i in range(90)]]

    def check(prompt: list[int], row: SampledRow, known: int) -> None:
        expected = own_choices(routing, model, [*prompt, *row.ids])[known:]
        np.testing.assert_array_equal(experts_of(row, routing), expected)

    for known in (0, 1, 3):
        futures = [(prompt, client.sample_rows(prompt, 2, params, known=known)) for prompt in prompts]
        for prompt, future in futures:
            for row in future.result():
                check(prompt, row, known)
                turn = [*prompt, *row.ids, 8, 9]
                (later,) = client.sample_rows(turn, 1, params, known=len(turn) - 2).result()
                check(turn, later, len(turn) - 2)
    with pytest.raises(EngineRequestError, match="known must be 0 to 3, the prompt's tokens, got 4"):
        client.sample_rows([5, 6, 7], 1, params, known=4)


def test_padding_is_not_recorded() -> None:
    model = mixture()
    routing = routing_of(model)
    rows = [PROMPTS[0][:12], PROMPTS[1][:7], PROMPTS[2][:9]]
    ids = torch.tensor([row + [0] * (12 - len(row)) for row in rows])
    decoder = HubDecoder(model, routing=routing)
    with torch.no_grad():
        _, states = decoder.prefill(ids, torch.tensor([len(row) for row in rows]))
    for row, state in zip(rows, states, strict=True):
        assert state[-1].keys is not None
        found = routing.packed(state[-1].keys)
        np.testing.assert_array_equal(found, own_choices(routing, model, [*row, 0])[1:])


def test_a_row_that_is_cut_keeps_what_it_chose(engine: EmbeddedEngine) -> None:
    routing, model = routing_in(engine), mixture()
    client = engine.create_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=200, stop=[], seed=1)

    def cut_after_some(_index: int, offset: int, *_: Any) -> None:
        if offset == 5:
            client.cut()

    (row,) = client.sample_rows([5, 6, 7], 1, params, report=cut_after_some).result()
    (never,) = client.sample_rows([5, 6, 7], 1, params).result()
    assert row.stop_reason == never.stop_reason == "cut"
    assert (never.ids, never.experts) == ([], b"")
    expected = own_choices(routing, model, [5, 6, 7, *row.ids])
    np.testing.assert_array_equal(experts_of(row, routing), expected)


def random_experts(routing: Routing, length: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (len(routing.routers), length, routing.chosen)
    ids = torch.from_numpy(rng.integers(0, routing.experts, shape))
    return np.concatenate([routing.unknown(1), routing.packed(ids)])


def test_packed_rows_replay_what_plain_rows_do() -> None:
    """A group of one prompt, where some sequences have the same experts there, some others, and some none."""
    model = mixture().double()
    routing = routing_of(model)
    rng = np.random.default_rng(1)
    prompt = rng.integers(2, 64, 30).tolist()
    of_prompt = [random_experts(routing, 29, seed) for seed in (1, 2)]
    data: list[tinker.Datum] = []
    for number in range(8):
        reply = rng.integers(2, 64, 12).tolist()
        experts = [of_prompt[number % 2], random_experts(routing, 12, 10 + number)[1:]]
        data.append(with_experts([*prompt, *reply], np.concatenate(experts)))
    data.append(sft_datum([*prompt, 5, 6]))
    found: list[tuple[list[np.ndarray], list[torch.Tensor]]] = []
    for shares in (False, True):
        trainer = Trainer(AllWeights(model), share_prefixes=shares, routing=routing)
        needed = frozenset({"target_tokens", "weights"})
        checked = [trainer._check(i, each, "cross_entropy", needed) for i, each in enumerate(data)]
        rows = trainer._rows(checked, 4096)
        assert (len(rows) < len(data)) == shares
        if shares:
            assert sum(tree.size for tree in rows) == 3 * 30 + 8 * 12 + 2 - 3
        output = trainer.forward_backward(data, "cross_entropy", None, backward=True)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append(([each["logprobs"].to_numpy() for each in output.loss_fn_outputs], gradients))
        trainer.drop_gradients()
    (plain, shared), both = zip(*found, strict=True)
    for one, other in zip(plain, shared, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # The gates are float32.


def test_gradients_are_those_of_the_chosen_experts() -> None:
    """The gates too: a replay of the model's own choices has its own gradient, also with recomputation, and
    another replay has none where it chooses nothing."""
    ids = PROMPTS[0]
    gradients: list[list[torch.Tensor | None]] = []
    for replays, recomputes in ((False, False), (True, False), (True, True)):
        model = mixture().double()
        routing = routing_of(model)
        experts = own_choices(routing, model, ids)
        if recomputes:
            checkpoint_activations(model)
        trainer = Trainer(AllWeights(model), routing=routing)
        data = with_experts(ids, experts) if replays else sft_datum(ids)
        trainer.forward_backward([data], "cross_entropy", None, backward=True)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, replayed, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        torch.testing.assert_close(replayed, plain)
        torch.testing.assert_close(recomputed, plain)
    other = np.where(np.arange(len(experts))[:, None] > 0, np.arange(experts.shape[1]) % 2, 255)
    trainer.drop_gradients()
    trainer.forward_backward(
        [with_experts(ids, other.astype(np.uint8))], "cross_entropy", None, backward=True
    )
    for name, parameter in model.named_parameters():
        if "experts" in name:
            assert parameter.grad is not None
            used = parameter.grad.flatten(1).abs().sum(1) > 0
            assert used.nonzero()[:, 0].tolist() == [0, 1]
        elif "mlp.gate" in name:
            assert parameter.grad is not None
            assert parameter.grad.any()


GROUPED: dict[str, Any] = {
    **{"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4},
    **{"topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 16},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}


def test_experts_of_other_groups_have_the_gates_that_their_scores_give() -> None:
    """What one text chose, replayed in another, where DeepSeek V3 would choose other groups of experts."""
    model = small_model("DeepseekV3", **GROUPED, initializer_range=0.5)
    routing = routing_of(model)
    assert (len(routing.routers), routing.number, routing.chosen, routing.experts) == (1, 2, 3, 16)
    one, other = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[25, 16, 37, 48, 59]])
    block = model.get_submodule(routing.routers[0])
    scores: list[torch.Tensor] = []
    given: list[tuple[torch.Tensor, ...]] = []
    block.gate.register_forward_hook(lambda _module, _inputs, output: scores.append(output.sigmoid()))
    block.experts.register_forward_pre_hook(lambda _module, inputs: given.append(inputs))
    with torch.no_grad():
        with routing.recorded(model) as found:
            model(input_ids=one)
        with routing.replayed(model, torch.stack(found, 1)):
            model(input_ids=other)
        model(input_ids=other)
    _, ids, gates = given[1]
    assert torch.equal(ids, found[0])
    assert not torch.equal(ids // 4, given[2][1] // 4)
    chosen = scores[1].gather(1, ids)
    torch.testing.assert_close(gates, 2.5 * chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Qwen3", {}, "a model of type 'qwen3' has no experts to choose from"),
        ("Phimoe", {"num_local_experts": 4}, "'phimoe' do not choose among their 4 experts with one call"),
        ("Mixtral", {"num_local_experts": 2}, "'mixtral' do not choose among their 2 experts with one call"),
    ],
)
def test_models_without_a_choice_are_refused_by_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=f"engine.routing_replay: .*{message}"):
        routing_of(small_model(name, num_key_value_heads=2, **settings))


def test_a_replay_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that changes nothing, and one that chooses the experts' neighbors."""
    replayed, model = Routing.replayed, mixture()

    def neighbors(self: Routing, model: Any, ids: torch.Tensor) -> Any:
        return replayed(self, model, (ids + 1) % self.experts)

    said = "the same ones change log probabilities by "
    for fault, gap in ((lambda *_: nullcontext(), "0 nats and others by 0,"), (neighbors, r"0\.\d+ nats")):
        monkeypatch.setattr(Routing, "replayed", fault)
        with pytest.raises(EngineError, match=said + gap):
            routing_of(model)


def test_choices_that_do_not_fit_are_refused_and_nothing_breaks(engine: EmbeddedEngine) -> None:
    client, routing = engine.create_training_client(), routing_in(engine)
    assert (routing.token_bytes, routing.dtype) == (4, torch.uint8)
    ids = PROMPTS[0]
    good, wide = (np.zeros((len(ids), width), np.uint8) for width in (4, 12))
    before = logprobs(client, [with_experts(ids, good)])
    partly = good.copy()
    partly[5, 0] = 255
    for experts, message in (
        (good + 32, r"ids outside \[0, 32\)"),
        (partly, "known for a part of a token's layers only"),
        (wide, r"int64 of shape \[19, 1\], for 4 bytes per token; .* \[19, 2\]"),
        (good[:-1], r"it is int64 of shape \[18, 1\]"),
    ):
        data = [with_experts(ids, good), with_experts(ids, experts)]
        with pytest.raises(EngineRequestError, match=f"datum 1: .*{message}"):
            client.forward_backward(data, "cross_entropy").result()
    floats = sft_datum(ids)
    floats.loss_fn_inputs[CHOSEN_EXPERTS] = tinker.TensorData.from_numpy(np.zeros((19, 1), np.float32))
    with pytest.raises(EngineRequestError, match="it is float32 of shape"):
        client.forward([floats], "cross_entropy").result()
    np.testing.assert_array_equal(logprobs(client, [with_experts(ids, good)]), before)


def test_256_experts_take_two_bytes() -> None:
    routing = Routing(("a", "b", "c"), 0, 256, 2)
    ids = torch.randint(256, (3, 5, 2))
    rows = routing.packed(ids)
    assert rows.shape == (5, routing.token_bytes) == (5, 12)
    np.testing.assert_array_equal(routing.unpacked(rows), ids.transpose(0, 1))
    assert (routing.unpacked(routing.unknown(4)) == -1).all()
    rows.view("<i2")[2, 3] = 256
    with pytest.raises(ValueError, match=r"ids outside \[0, 256\)"):
        routing.unpacked(rows)


def test_experts_are_refused_where_nothing_replays_them(folder: Path, tmp_path: Path) -> None:
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path) as engine:
        client = engine.create_training_client()
        data = with_experts(PROMPTS[0], np.zeros((20, 4), np.uint8))
        with pytest.raises(EngineRequestError, match=r"engine\.routing_replay is off"):
            client.forward([data], "cross_entropy").result()
        params = tinker.SamplingParams(max_tokens=4)
        (row,) = engine.create_sampling_client().result().sample_rows(PROMPTS[0], 1, params).result()
        assert row.experts == b""


def test_the_cache_has_room_for_them(folder: Path, tmp_path: Path) -> None:
    """A context as long as the cache, to its last token."""
    settings: dict[str, Any] = {"cache_tokens": 128, "max_batch": 1, "routing_replay": True}
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, **settings) as engine:
        assert engine.max_context == 128
        params = tinker.SamplingParams(max_tokens=28, stop=[], seed=0)
        prompt = [2 + i % 60 for i in range(100)]
        (row,) = engine.create_sampling_client().result().sample_rows(prompt, 1, params).result()
        assert (len(row.ids), len(row.experts)) == (28, 128 * 4)
