"""Through every converter, each token trains at most once, after its own prefix, with its own logprob."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.rollouts.advantages import RolloutBatch, RolloutGroup
from tinkerscript.rollouts.call import Call, full_prompts
from tinkerscript.rollouts.parquet import read_parquet, to_table, write_parquet
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.rollouts.trainers import to_datum, to_trl, to_verl

Row = tuple[Any, Any, Any]
"""Tokens [T], mask of the tokens that train [T], logprobs [T]."""

Training = tuple[bytes, int, bytes]
"""A token that trains: its prefix, its id, its logprob."""


@st.composite
def episodes(draw: st.DrawFn, *, turns: int, forks: bool) -> list[Call]:
    """Conversations over few ids, so that prefixes collide, some of their tokens constrained."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, turns))):
        parent = draw(st.sampled_from([None, *calls])) if forks else (calls[-1] if calls else None)
        sampled = draw(ids)
        logprobs = [draw(st.floats(-20, -0.125, width=32)) for _ in sampled]
        kinds = draw(st.sampled_from([b"", bytes(draw(st.integers(0, 3)) for _ in sampled)]))
        calls.append(make_call(parent, draw(ids), sampled, logprobs=logprobs, constrained=kinds))
    return calls


def groups(*, turns: int = 4, forks: bool = False) -> st.SearchStrategy[RolloutGroup]:
    members = st.lists(episodes(turns=turns, forks=forks), min_size=2, max_size=3)
    return members.map(
        lambda made: make_group([make_episode(c, float(i % 2), f"e{i}") for i, c in enumerate(made)])
    )


def expected(group: RolloutGroup) -> Counter[Training]:
    """Every token that a call sampled and no grammar constrained."""
    found: Counter[Training] = Counter()
    for episode in group.episodes:
        prompts = full_prompts(episode.calls)
        for call in episode.calls:
            kinds = call.constrained or bytes(len(call.sampled_ids))
            for place, (token, kind) in enumerate(zip(call.sampled_ids.tolist(), kinds, strict=True)):
                prefix = prompts[call.call_id] + call.sampled[: 4 * place]
                found[prefix, token, call.logprobs[4 * place : 4 * place + 4]] += kind == 0
    return +found


def trained(rows: Iterator[Row]) -> Counter[Training]:
    found: Counter[Training] = Counter()
    for tokens, mask, logprobs in rows:
        ids, values = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
        assert len(ids) == len(mask) == len(values)
        for place in np.flatnonzero(np.asarray(mask)).tolist():
            found[ids[:place].tobytes(), int(ids[place]), values[place].tobytes()] += 1
    return found


def joined(prompt: list[int], response: list[int], mask: Any, logprobs: Any) -> Row:
    zeros = [0] * len(prompt)
    return prompt + response, [*zeros, *mask], [*zeros, *logprobs]


def tinker(group: RolloutGroup) -> Iterator[Row]:
    """A token trains if its advantage is not 0; here none is, since the rewards differ."""
    for weighted in group.weighted():
        datum = to_datum(weighted)
        inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        tokens = [*datum.model_input.to_ints(), int(inputs["target_tokens"][-1])]
        assert tokens[1:] == inputs["target_tokens"].tolist()
        yield tokens, [0, *(inputs["advantages"] != 0)], [0, *inputs["logprobs"]]


def verl(group: RolloutGroup) -> Iterator[Row]:
    batch = {name: np.asarray(value) for name, value in to_verl(RolloutBatch((group,))).items()}
    assert batch["rm_scores"].sum(axis=1).tolist() == group.rewards
    assert set(batch["uid"]) == {group.group_id}
    width = batch["prompts"].shape[1]
    for row, there in enumerate(batch["attention_mask"].astype(bool)):
        size = int(there[width:].sum())
        assert not batch["response_mask"][row][size:].any()
        columns = (batch[name][row][:size] for name in ("response_mask", "rollout_log_probs"))
        prompt = batch["prompts"][row][there[:width]].tolist()
        yield joined(prompt, batch["responses"][row][:size].tolist(), *columns)


def trl(group: RolloutGroup) -> Iterator[Row]:
    made = to_trl([group])
    assert made["reward"] == group.rewards
    columns = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    for row in zip(*(made[name] for name in columns), strict=True):
        yield joined(*row)


def parquet(group: RolloutGroup) -> Iterator[Row]:
    """As a reader without this package would train on it."""
    with TemporaryDirectory() as folder:
        write_parquet(Path(folder, "r.parquet"), [group])
        (read,) = read_parquet(Path(folder, "r.parquet"))
    assert (read.group_id, read.rewards) == (group.group_id, group.rewards)
    assert [episode.calls for episode in read.episodes] == [episode.calls for episode in group.episodes]
    for row in to_table([read]).to_pylist():
        yield row["tokens"], row["loss_mask"], row["logprobs"]


READERS: dict[str, tuple[Callable[[RolloutGroup], Iterator[Row]], st.SearchStrategy[RolloutGroup]]] = {
    "tinker": (tinker, groups(forks=True)),
    "verl": (verl, groups()),
    "trl": (trl, groups()),
    "parquet": (parquet, groups(forks=True)),
}
"""How each form is read back, and the groups that it holds."""


@pytest.mark.parametrize("form", READERS)
def test_each_token_trains_once_after_its_prefix_with_its_logprob(form: str) -> None:
    read, strategy = READERS[form]

    @settings(max_examples=40, deadline=None)
    @given(strategy)
    def check(group: RolloutGroup) -> None:
        rows = list(read(group))
        assert trained(iter(rows)) == expected(group)

    check()


@settings(max_examples=40, deadline=None)
@given(groups(forks=True))
def test_told_to_train_them_constrained_tokens_train_once_too(group: RolloutGroup) -> None:
    told, free = list[EpisodeRollouts](), list[EpisodeRollouts]()
    for each in group.episodes:
        named = (each.reward, each.episode_uuid)
        told.append(make_episode(list(each.calls), *named, trains_constrained=True))
        free.append(make_episode([structs.replace(call, constrained=b"") for call in each.calls], *named))
    for read in (tinker, parquet):
        assert trained(read(make_group(told))) == expected(make_group(free))
