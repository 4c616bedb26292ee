"""Shared prefixes in training: the same losses, log probabilities and gradients as plain rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st

from small_models import small_model
from tinkerscript.engine.packing import (
    MAX_BRANCHING_TOKENS,
    microbatches,
    pair_cost,
    shares_prefixes,
    token_trees,
)
from tinkerscript.engine.training import AllWeights, Trainer
from tinkerscript.engine.weights import load_model

LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo"]


def datum(ids: list[int], rng: np.random.Generator, loss_fn: str) -> tinker.Datum:
    """Trains on `ids`, with a random weight or advantage and log probability for each position."""
    length = len(ids) - 1
    inputs: dict[str, np.ndarray] = {"target_tokens": np.array(ids[1:], np.int64)}
    if loss_fn == "cross_entropy":
        inputs["weights"] = rng.random(length).astype(np.float32)
    else:
        inputs["logprobs"] = (-4 + rng.normal(size=length)).astype(np.float32)
        inputs["advantages"] = rng.normal(size=length).astype(np.float32)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def groups(rng: np.random.Generator) -> list[list[int]]:
    """Two groups of one turn, one of two turns that part at three depths, a lone one, and one twice."""
    prompts = [rng.integers(0, 64, length).tolist() for length in (12, 5)]
    found = [p + rng.integers(0, 64, rng.integers(1, 9)).tolist() for p in prompts for _ in range(6)]
    first = rng.integers(0, 64, 7).tolist()
    for turn in (rng.integers(0, 64, 6).tolist() for _ in range(3)):
        found += [first + turn + rng.integers(0, 64, 9).tolist() for _ in range(3)]
        found += [first + turn]
    lone = rng.integers(0, 64, 20).tolist()
    return [*found, lone, lone]


@pytest.mark.parametrize("budget", [8192, 40])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_sharing_prefixes_changes_no_gradient(loss_fn: str, budget: int) -> None:
    """In float64 throughout, which GPT-2 is: Llama's norms compute in float32 whatever the weights are."""
    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    plain = small_model("GPT2", initializer_range=0.3, **shape).double()
    shared = copy.deepcopy(plain)
    rng = np.random.default_rng(7)
    data = [datum(ids, rng, loss_fn) for ids in groups(rng)]
    rng.shuffle(data)
    one = Trainer(AllWeights(plain)).forward_backward(data, loss_fn, None, backward=True)
    trainer = Trainer(AllWeights(shared), share_prefixes=True, microbatch_tokens=budget)
    other = trainer.forward_backward(data, loss_fn, None, backward=True)
    assert other.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-10)
    for row, again in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(again["logprobs"].to_numpy(), row["logprobs"].to_numpy(), atol=1e-6)
    for p, q in zip(plain.parameters(), shared.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-11 * float(p.grad.abs().max()))


sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda ids: np.array(ids, np.int64)),
    min_size=1,
    max_size=12,
)


@given(sequences, st.sampled_from([0.0, 0.01, 0.1]), st.sampled_from([4, 20, 1000]))
def test_every_token_sees_its_own_sequence_and_nothing_else(
    rows: list[np.ndarray], cost: float, budget: int
) -> None:
    trees = token_trees(rows, pair_cost=cost, budget=budget)
    assert sorted(index for tree in trees for index, _ in tree.paths) == list(range(len(rows)))
    for tree in trees:
        longest = max(len(path) for _, path in tree.paths)
        assert tree.size <= (longest if tree.is_chain else max(budget, 2 * longest))
        visible = tree.visible()
        for index, path in tree.paths:
            assert tree.ids[path].tolist() == rows[index].tolist()
            assert tree.depths[path].tolist() == list(range(len(path)))
            for depth, place in enumerate(path):
                assert np.flatnonzero(visible[place]).tolist() == sorted(path[: depth + 1].tolist())
        if tree.is_chain:
            assert (visible == np.tri(tree.size, dtype=bool)).all()
    if cost == 0 and budget == 1000:
        prefixes = {tuple(row[: end + 1].tolist()) for row in rows for end in range(len(row))}
        assert sum(tree.size for tree in trees) == len(prefixes)


@given(sequences, st.sampled_from([0.0, 0.1]), st.sampled_from([10, 50]))
def test_microbatches_hold_every_row_once_within_the_budget(
    rows: list[np.ndarray], cost: float, budget: int
) -> None:
    trees = token_trees(rows, pair_cost=cost, budget=budget)
    batches = microbatches(trees, budget)
    assert sorted(id(tree) for batch in batches for tree in batch) == sorted(map(id, trees))
    for batch in batches:
        assert len(batch) * max(tree.size for tree in batch) <= budget or len(batch) == 1
        assert len({tree.is_chain for tree in batch}) == 1


def test_long_and_short_rows_are_not_padded_to_each_other() -> None:
    lengths = [20] * 50 + [500] * 2 + [30] * 50
    rng = np.random.default_rng(0)
    trees = token_trees([rng.integers(0, 64, n) for n in lengths], pair_cost=0.01, budget=8192)
    batches = microbatches(trees, 8192)
    padded = sum(len(batch) * max(tree.size for tree in batch) for batch in batches)
    assert padded <= 1.2 * sum(lengths)


def test_a_group_with_short_answers_is_one_row_and_long_answers_are_not(random_model: Path) -> None:
    """All pairs of a row are paid for, so a prompt is not worth sharing by answers that are much longer."""
    cost = pair_cost(load_model(random_model))
    (tree,) = token_trees(group_of(8, prompt=60, answer=4), pair_cost=cost, budget=8192)
    assert len(tree.paths) == 8
    assert len(token_trees(group_of(8, prompt=60, answer=1000), pair_cost=cost, budget=16384)) == 8


def group_of(size: int, *, prompt: int, answer: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 64, prompt)
    return [np.concatenate([stem, rng.integers(0, 10**9, answer)]) for _ in range(size)]


def test_a_group_shares_a_prompt_that_nearly_fills_the_budget() -> None:
    """A row holds up to twice its longest sequence: a prompt of 4,000 tokens is computed once."""
    (tree,) = token_trees(group_of(16, prompt=4000, answer=200), pair_cost=1e-4, budget=4096)
    assert tree.size == 4000 + 16 * 200


def test_duplicates_are_computed_once_whatever_their_length() -> None:
    (ids,) = group_of(1, prompt=9000, answer=0)
    (tree,) = token_trees([ids, ids.copy(), ids[:8500]], pair_cost=1e-4, budget=4096)
    assert tree.size == 9000
    assert tree.is_chain


def test_rows_that_need_a_mask_and_their_microbatches_are_bounded() -> None:
    """A mask has an entry for each pair of tokens: 256 MiB in float32 for 8,192 of them."""
    sequences = [*group_of(40, prompt=6000, answer=100), *group_of(8, prompt=9000, answer=9)]
    trees = token_trees(sequences, pair_cost=0.0, budget=16_384)
    branching = [tree for tree in trees if not tree.is_chain]
    assert branching
    assert max(tree.size for tree in branching) <= MAX_BRANCHING_TOKENS
    assert all(tree.size <= 9009 for tree in trees)
    batches = microbatches([*branching, *branching], 16_384)
    assert max(len(batch) * batch[-1].size ** 2 for batch in batches) <= MAX_BRANCHING_TOKENS**2


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_a_model_that_fails_on_a_mask_trains_on_plain_rows(
    random_model: Path, error: type[Exception]
) -> None:
    model = load_model(random_model)

    def refuse(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is not None:
            raise error("no masks here")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert not shares_prefixes(model)
