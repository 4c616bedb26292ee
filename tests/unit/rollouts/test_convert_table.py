"""Rollouts in Parquet files and Hugging Face datasets come back equal."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, random_calls
from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.convert import table
from tinkerscript.rollouts.convert.table import (
    from_dataset,
    from_table,
    read_parquet,
    to_dataset,
    to_table,
    write_parquet,
)
from tinkerscript.rollouts.rollout import Rollout


def rollouts() -> list[Rollout]:
    """Forks, shaped and plain rewards, none at all, every kind of call."""
    made = [
        rollout
        for seed in range(6)
        for rollout in make_episode(random_calls(seed, forks=seed % 3), name=f"e{seed}").rollouts
    ]
    odd = make_call(
        None,
        [1],
        [2, 3],
        logprobs=[-1e-8, float(np.float32(-1 / 3))],
        stop_reason="length",
        policy_version=7,
        temperature=0.1 + 0.2,
        top_p=0.9,
        top_k=3,
        logprob_kind="raw",
        ids_from="meta_info",
        prompt_from="client",
        fork_reason="history_edited",
        messages='[{"role": "user", "content": "für \U0001f600"}]',
    )
    made += make_episode([odd], name="odd").rollouts
    made[0] = made[0].rewarded(0.5, "env", "example 1")
    shares = np.where(made[1].response_mask, 1 / 3, 0)
    made[1] = made[1].rewarded(shares)
    return made


def assert_equal(ours: Rollout, theirs: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        left, right = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        elif isinstance(left, float) and np.isnan(left):
            assert np.isnan(right)
        else:
            assert left == right, field.name


def assert_all_equal(made: list[Rollout], read: list[Rollout]) -> None:
    for ours, theirs in zip(made, read, strict=True):
        assert_equal(ours, theirs)


def test_parquet_gives_back_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROWS_PER_GROUP", 4)
    made = rollouts()
    assert len(made) > 8
    assert write_parquet(tmp_path / "r.parquet", iter(made)) == len(made)
    assert_all_equal(made, list(read_parquet(tmp_path / "r.parquet")))


def test_a_dataset_gives_back_what_it_was_given(tmp_path: Path) -> None:
    made = rollouts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, on import
        dataset = to_dataset(made)
        assert_all_equal(made, from_dataset(dataset))
        dataset.save_to_disk(str(tmp_path / "saved"))
        loaded = importlib.import_module("datasets").load_from_disk(str(tmp_path / "saved"))
        assert_all_equal(made, from_dataset(loaded))
        picked = dataset.select([3, 1])
        assert_all_equal([made[3], made[1]], from_dataset(picked))


def test_no_rollouts_are_a_table_too(tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "r.parquet", []) == 0
    assert list(read_parquet(tmp_path / "r.parquet")) == []


def test_a_call_that_says_otherwise_is_refused() -> None:
    rollout = rollouts()[0]
    logprobs = rollout.logprobs.copy()
    logprobs[rollout.segments[1].start] -= 1
    call = rollout.segments[1].call.call_id
    with pytest.raises(
        ConversionError,
        match=f"call {call} of episode .* disagrees with its sequence about tokens",
    ):
        to_table([dataclasses.replace(rollout, logprobs=logprobs)])


def test_a_reward_out_of_bounds_is_not_read_back() -> None:
    made = to_table([make_episode([make_call(None, [1], [2])]).rollouts[0].rewarded(1.0)])
    row = made.to_pylist()[0] | {"episode_reward": 1.7e308}
    with pytest.raises(ConversionError, match=r"1\.7e\+308 is above"):
        from_table(type(made).from_pylist([row], schema=made.schema))


def test_another_table_is_refused() -> None:
    with pytest.raises(ConversionError, match="not a table of rollouts: it has no column fork"):
        from_table(to_table(rollouts()).drop_columns(["fork"]))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConversionError, match=r"need pyarrow: pip install 'tinkerscript\[datasets\]'"):
        to_table(rollouts())
