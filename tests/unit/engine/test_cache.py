"""The key-value cache: what is kept between calls, within which budget, and that it changes nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import tinker
import torch

from engine_helpers import assert_same, batch_over, family_model, run, sampled, seeded
from small_models import small_model
from tinkerscript.engine import memory, prefix_store, running_batch
from tinkerscript.engine.decoder import Decoder, FusedDecoder, HubDecoder
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.kv_cache import CacheBudget, LayerState, RowState, cut
from tinkerscript.engine.memory import cache_bytes
from tinkerscript.engine.prefix_store import WORTH_TOKENS, PrefixStore
from tinkerscript.engine.running_batch import Request, SampledRow
from tinkerscript.errors import EngineError
from tinkerscript.model_folder import TINY_MODEL

SHAPE: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 2}


def fused(**settings: Any) -> FusedDecoder:
    shape = {**SHAPE, "max_position_embeddings": 1024, "initializer_range": 0.3}
    return FusedDecoder(small_model("Qwen3", **shape, **settings))


def family_decoder(name: str) -> HubDecoder:
    return HubDecoder(family_model(name).requires_grad_(False), shares=True)


def sampled_alone(decoder: Decoder, request: Request, **settings: Any) -> list[list[SampledRow]]:
    """What the request samples after a fresh prefill, with nothing kept and nobody beside it."""
    again = seeded(request.prompt, request.max_tokens, request.num_samples, request.seed or 0)
    return sampled(batch_over(decoder, **settings), again)


def ids_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def test_a_conversation_of_20_turns_prefills_what_is_new_and_no_more() -> None:
    """New are a turn's own tokens and the last one of the reply before, which nothing was sampled after."""
    decoder = fused()
    batch = batch_over(decoder)
    text: list[int] = []
    for turn in range(20):
        text += ids_of(24, turn)
        before = batch.prefilled_tokens
        found = sampled(batch, request := seeded(text, 16, seed=turn))
        assert batch.prefilled_tokens - before == 24 + (turn > 0)
        assert_same(found, sampled_alone(decoder, request))
        text += found[0][0].ids


WITH_STATES = ["Qwen 3 Next", "Falcon H1"]


@pytest.mark.parametrize(
    "name", ["", "GPT-2", "gpt-oss", "Llama 4 (text)", "DeepSeek V3, Kimi K2", *WITH_STATES]
)
def test_prompts_that_wait_together_compute_their_common_beginning_once(name: str) -> None:
    """A system prompt, for example. A state cannot branch, so a model that has one starts anew. Rows end at
    different times, so that others move to their places: prompts of three windows, and of less than one."""
    decoder = family_decoder(name) if name else fused()
    system = ids_of(40, 0)
    tails = [[number, *ids_of(length, number)] for number, length in enumerate([3, 8, 5])]
    requests = [seeded(system + tail, 6 + 4 * tail[0], samples=2, seed=tail[0]) for tail in tails]
    requests.append(seeded(ids_of(5, 9), 20))
    batch = batch_over(decoder, max_length=256)
    found = sampled(batch, *requests)
    assert batch.prefilled_tokens == 5 + sum(map(len, tails)) + 40 * (3 if name in WITH_STATES else 1)
    requests.append(seeded([*system, 7, 8], 10))
    found += sampled(batch, requests[-1])
    for request, rows in zip(requests, found, strict=True):
        assert_same([rows], sampled_alone(decoder, request, max_length=256))


@pytest.mark.parametrize("seed", range(6))
def test_conversations_that_branch_are_sampled_as_after_a_fresh_prefill(seed: int, monkeypatch: Any) -> None:
    """Several conversations at once, with common beginnings, forks at any token, and a small cache."""
    monkeypatch.setattr(running_batch, "PREFILL_TOKENS", 96)
    rng = random.Random(seed)
    decoder = fused()
    budget = rng.choice([float("inf"), 400_000.0, 250_000.0])
    batch = batch_over(decoder, budget, max_rows=rng.choice([2, 5, 64]))
    system = ids_of(rng.choice([5, 70, 150]), seed)
    texts: list[list[int]] = [system]
    for turn in range(6):
        requests: list[Request] = []
        for _ in range(rng.randint(1, 5)):
            old = rng.choice(texts)
            prompt = old[: rng.choice([len(old), rng.randint(1, len(old))])] + ids_of(
                rng.choice([1, 7, 60, 200]), turn
            )
            requests.append(seeded(prompt[:700], rng.randint(1, 40), rng.randint(1, 3), rng.randrange(100)))
        found = sampled(batch, *requests)
        for request, rows in zip(requests, found, strict=True):
            assert_same([rows], sampled_alone(decoder, request))
            texts += [[*request.prompt, *row.ids] for row in rows]
    assert batch._budget.has_room(0)


@pytest.mark.parametrize(
    ("name", "turn", "known"),
    [
        ("gpt-oss", 20, True),
        ("Llama 4 (text)", 20, True),
        ("DeepSeek V3, Kimi K2", 20, True),
        ("Qwen 3 Next", 2, True),
        ("Falcon H1", 2, True),
        ("LFM 2", 2, True),
        ("Qwen 3.5", 60, False),
    ],
)
def test_other_layers_go_on_from_the_ends_of_calls(name: str, turn: int, known: bool) -> None:
    """Windows keep their last tokens, states are those after the last; long turns start again."""
    decoder = family_decoder(name)
    batch = batch_over(decoder, max_length=256)
    text = ids_of(60, 0)
    for number in range(3):
        before = batch.prefilled_tokens
        found = sampled(batch, request := seeded(text, 10, seed=number))
        assert batch.prefilled_tokens - before == (turn + 1 if known and number else len(text))
        assert_same(found, sampled_alone(decoder, request, max_length=256))
        text += found[0][0].ids + ids_of(turn, number)


@pytest.mark.parametrize("name", ["gpt-oss", "Llama 4 (text)"])
def test_a_prompt_of_many_windows_is_prefilled_in_chunks(name: str, monkeypatch: Any) -> None:
    decoder = family_decoder(name)
    request = seeded(ids_of(100, 0), 30)
    wanted = sampled_alone(decoder, request, max_length=256)
    monkeypatch.setattr(running_batch, "PREFILL_TOKENS", 9)
    assert_same(sampled_alone(decoder, request, max_length=256), wanted)


def test_other_rows_go_on_while_a_long_prompt_is_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_batch, "PREFILL_TOKENS", 50)
    batch = batch_over(fused())
    running, long = seeded(ids_of(10, 0), 40), seeded(ids_of(500, 1), 3)
    tokens: list[str] = []
    running.report = lambda *_: tokens.append("short")
    long.report = lambda *_: tokens.append("long")
    batch.submit(running)
    batch.advance()
    batch.submit(long)
    run(batch)
    assert tokens.index("long") == 1 + 10
    assert batch.prefilled_tokens == 510


def token_bytes(decoder: FusedDecoder) -> int:
    batch = batch_over(decoder)
    sampled(batch, seeded([1], 1))
    return batch._cache.row_bytes(1)


def test_half_the_budget_that_is_needed_finishes_everything_and_takes_longer() -> None:
    decoder = fused()
    wanted, requests = ([seeded(ids_of(100, i), 150, seed=i) for i in range(8)] for _ in range(2))
    sampled(ample := batch_over(decoder), *wanted)
    need = 8 * 250 * token_bytes(decoder)
    tight = batch_over(decoder, need / 2)
    for request in requests:
        tight.submit(request)
    most = 0
    while tight.busy:
        tight.advance()
        most = max(most, sum(each.bytes for each in tight._budget.holders))
    assert_same(*([each.future.result() for each in group] for group in (requests, wanted)))
    assert most <= need / 2
    assert tight.prefilled_tokens > ample.prefilled_tokens == 800


def test_what_can_never_fit_is_refused_by_name_and_alone() -> None:
    decoder = fused()
    batch = batch_over(decoder, 200 * token_bytes(decoder))
    fits, prompt, reply = seeded(ids_of(20, 1), 30), seeded(ids_of(300, 2), 5), seeded(ids_of(100, 3), 300)
    for request in (fits, prompt, reply):
        batch.submit(request)
    run(batch)
    assert len(fits.future.result()[0].ids) == 30
    said = r"tokens of prompt and reply need .* MiB; raise engine.cache_tokens"
    for request in (prompt, reply):
        with pytest.raises(EngineError, match=said):
            request.future.result()


@pytest.mark.parametrize("others", [100, 330])
def test_rows_take_memory_by_their_own_lengths(others: int) -> None:
    """31 rows of similar lengths and a long one: what their tensors take against the formula, and against
    what one dense tensor would take."""
    model = small_model("Qwen3", **SHAPE, max_position_embeddings=9000)
    batch = batch_over(FusedDecoder(model), max_length=9000)
    lengths = [8192] + [others + i for i in range(31)]
    for number, length in enumerate(lengths):
        batch.submit(seeded(ids_of(length, number), 40))
    while len(batch._cache.rows) < 32:
        batch.advance()
    layers = [layer for group in batch._cache.groups for layer in group.layers]
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert stored == batch._cache.bytes
    assert stored == pytest.approx(cache_bytes(model, torch.float32, batch._cache.lengths), rel=0.05)
    token = batch._cache.row_bytes(1)
    assert stored < 1.25 * sum(lengths) * token < 0.2 * 32 * 8192 * token


@pytest.mark.parametrize(("room", "name"), [(prefix_store, "joined"), (running_batch, "cut")])
def test_without_memory_to_reuse_a_text_one_request_fails_and_to_keep_it_none(
    room: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = fused()
    batch = batch_over(decoder)
    prompt, other = ids_of(80, 1), ids_of(80, 2)
    (rows,) = sampled(batch, seeded(prompt, 10))
    again, beside = seeded([*prompt, *rows[0].ids, 7], 10), seeded(other, 10)

    def no_memory(*_: Any) -> RowState:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as short:
        short.setattr(room, name, no_memory)
        for request in (beside, again):
            batch.submit(request)
        run(batch)
    assert_same([beside.future.result()], sampled_alone(decoder, beside))
    assert (again.future.exception() is not None) == (name == "joined")
    for request in (seeded(again.prompt, 10), seeded(other[:70], 10)):
        assert_same(sampled(batch, request), sampled_alone(decoder, request))


def test_versions_never_mix_and_share_one_budget() -> None:
    """What old weights keep makes room for the newer ones', and goes with them."""
    budget = CacheBudget(60_000)
    decoders = [fused(), FusedDecoder(small_model("Qwen3", seed=1, **SHAPE))]
    batches = [batch_over(each, budget=budget, max_length=64) for each in decoders]
    for turn in range(6):
        for batch, decoder in zip(batches, decoders, strict=True):
            request = seeded(ids_of(40, turn), 8)
            assert_same(sampled(batch, request), sampled_alone(decoder, request, max_length=64))
            assert sum(each.bytes for each in budget.holders) <= budget.total
    del batches[0], batch
    assert len(budget.stores) == 1


def test_a_cache_below_the_context_is_the_context(tmp_path: Path) -> None:
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path, cache_tokens=200) as engine:
        assert engine.max_context == 192
        (said,) = [each for each in engine.warnings if "engine.cache_tokens" in each]
        assert said.startswith("prompt and reply together hold 192 tokens here, of this model's 2,048: ")
        client = engine.create_sampling_client().result()
        params = tinker.SamplingParams(stop=[])
        (found,) = client.sample(tinker.ModelInput.from_ints(ids_of(150, 0)), 1, params).result().sequences
        assert (len(found.tokens), found.stop_reason) == (42, "length")
        with pytest.raises(EngineError, match="192 tokens; the context holds 192"):
            client.sample(tinker.ModelInput.from_ints(ids_of(192, 0)), 1, params)


def test_a_version_that_is_sampled_apart_is_not_prefilled_again(tmp_path: Path) -> None:
    prompt, params = tinker.ModelInput.from_ints(ids_of(90, 0)), tinker.SamplingParams(max_tokens=4, seed=1)
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path) as engine:
        training = engine.create_training_client()
        client = training.save_weights_and_get_sampling_client().result()
        newer = training.save_weights_and_get_sampling_client().result()
        counts = []
        for each in (client, client.apart(), newer):
            each.sample(prompt, 1, params).result()
            counts.append(each._batch.prefilled_tokens)
        assert counts == [90, 0, 90]


def test_the_cache_takes_what_training_leaves_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Qwen3", **SHAPE)
    token = cache_bytes(model, torch.float32, [64]) // 64

    def budget(free: int | None, max_context: int = 64) -> int:
        monkeypatch.setattr(memory, "available_memory", lambda _: free)
        return memory.cache_budget(
            model, None, torch.float32, max_rows=128, max_context=max_context, checkpointing=False
        )

    assert token == 2 * 4 * 16 * 2
    assert budget(None) == budget(2**40) == 128 * 64 * token
    found = [(free, budget(free, 2**20)) for free in range(2**20, 2**26, 2**20)]
    assert all(free // 4 <= left <= free // 2 for free, left in found), "a CPU's memory is for others too"
    between = {free - left for free, left in found if free // 4 < left < free // 2}
    assert len(between) == 1, "what training may need"


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@pytest.mark.parametrize("seed", range(4))
def test_the_store_is_a_model_of_a_list_of_texts(seed: int) -> None:
    """The longest common prefix with any text that is kept, and the state of just those ids; bytes add up."""
    rng = random.Random(seed)
    budget = CacheBudget()
    store, texts = PrefixStore(budget), []

    def state(ids: Sequence[int]) -> RowState:
        keys = torch.tensor(ids, dtype=torch.float32).reshape(1, -1, 1)
        return [LayerState(keys, keys + 0.5)]

    for _ in range(300):
        if rng.random() < 0.15 and store.oldest is not None:
            store.evict()
            texts = []
            continue
        start = list(rng.choice(texts)) if texts and rng.random() < 0.8 else []
        more = [rng.randrange(3) for _ in range(rng.randint(1, 90))]
        text = tuple(start[: rng.randint(0, len(start))] + more)
        found, known = store.longest(text)
        best = max((common_length(text, each) for each in texts), default=0)
        if texts and best >= WORTH_TOKENS:
            assert found == best or len(texts) < 2
        if known is not None:
            torch.testing.assert_close(known[0].keys, state(text[:found])[0].keys)
            torch.testing.assert_close(known[0].values, state(text[:found])[0].values)
        store.keep(text, lambda begin, text=text: cut(state(text), begin))
        texts.append(text)
        assert store.longest(text)[0] == len(text)
    while store.oldest is not None:
        store.evict()
    assert store.bytes == 0


def test_rows_that_all_reach_their_groups_limit_stay_where_they_are() -> None:
    """Moving them would need room for all of them twice."""
    decoder = fused()
    rows = [seeded(ids_of(250, i), 40, seed=i) for i in range(4)]
    batch = batch_over(decoder, 4 * 320 * token_bytes(decoder))
    for request in rows:
        batch.submit(request)
    groups: set[int] = set()
    while batch.busy:
        batch.advance()
        groups |= {id(group) for group in batch._cache.groups}
    assert all(len(request.future.result()[0].ids) == 40 for request in rows)
    assert len(groups) == 1
    assert batch.prefilled_tokens == 4 * 250, "nobody gave up a place"


def test_a_failed_prefills_memory_is_free_when_its_parts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[ref[torch.Tensor]] = []
    at_retry: list[bool] = []
    decoder = fused()
    prefill = decoder.prefill

    def short_of_memory(ids: torch.Tensor, *rest: Any) -> Any:
        if len(ids) > 1:
            states = torch.empty(1)
            held.append(ref(states))
            raise RuntimeError("CUDA out of memory")
        at_retry.append(held[-1]() is None)
        return prefill(ids, *rest)

    monkeypatch.setattr(decoder, "prefill", short_of_memory)
    sampled(batch_over(decoder), seeded(ids_of(20, 1), 3), seeded(ids_of(20, 2), 3))
    assert at_retry == [True, True]
