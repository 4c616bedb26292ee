"""Groups of rollouts in Parquet files and Hugging Face datasets come back equal, or are refused."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.errors import ConversionError
from tinkerscript.rollouts import parquet
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.parquet import from_table, read_parquet, to_table, write_parquet
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout


def groups() -> list[RolloutGroup]:
    """Forks, shaped and plain rewards, none at all, every kind of call; an episode without any sequence."""
    made = [make_episode(random_calls(seed, forks=seed % 3), seed / 7, f"e{seed}") for seed in range(6)]
    sampling = {"temperature": 0.1 + 0.2, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}
    origin = {"logprob_kind": "raw", "ids_from": "meta_info", "prompt_from": "client"}
    odd = make_call(
        *(None, [1], [2, 3]),
        logprobs=[-1e-8, float(np.float32(-1 / 3))],
        stop_reason="length",
        policy_version=7,
        constrained=bytes([3, 0]),
        fork_reason="history_edited",
        messages='[{"role": "user", "content": "für \U0001f600"}]',
        **sampling,
        **origin,
    )
    silent = make_call(None, [1, 2], [])
    first = dataclasses.replace(
        made[0], rollouts=(made[0].rollouts[0].rewarded(0.5, "env", "example 1"), *made[0].rollouts[1:])
    )
    shares = np.where(made[1].rollouts[0].response_mask, 1 / 3, 0)
    second = dataclasses.replace(
        made[1],
        rollouts=(made[1].rollouts[0].rewarded(shares), *made[1].rollouts[1:]),
        metadata={"tool": {"calls": 2}, "said": "ü"},
    )
    masked = [dataclasses.replace(r, loss_mask=r.sampled & (r.tokens > 20)) for r in made[3].rollouts]
    told = dataclasses.replace(made[3], rollouts=tuple(masked))
    return [
        make_group([first, second, made[2]], "a"),
        make_group([told, made[4]], "b"),
        # The next group has the same name, and the last two sequences lie apart.
        make_group([made[5], make_episode([silent], -1.0, "silent")], "b"),
        make_group([make_episode([silent, odd], 0.0, "odd"), made[0]], "c"),
    ]


def assert_same(ours: Rollout, theirs: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        left, right = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        elif isinstance(left, float) and np.isnan(left):
            assert np.isnan(right)
        else:
            assert left == right, field.name


def assert_equal(made: list[RolloutGroup], read: list[RolloutGroup]) -> None:
    assert [group.group_id for group in made] == [group.group_id for group in read]
    for group, again in zip(made, read, strict=True):
        for episode, other in zip(group.episodes, again.episodes, strict=True):
            for field in dataclasses.fields(EpisodeRollouts):
                if field.name != "rollouts":
                    assert getattr(episode, field.name) == getattr(other, field.name)
            for ours, theirs in zip(episode.rollouts, other.rollouts, strict=True):
                assert_same(ours, theirs)


def test_parquet_gives_back_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 4)
    made = groups()
    rows = sum(max(1, len(episode.rollouts)) for group in made for episode in group.episodes)
    assert rows > 12
    assert write_parquet(tmp_path / "r.parquet", iter(made)) == rows
    assert_equal(made, list(read_parquet(tmp_path / "r.parquet")))


def test_a_hugging_face_dataset_reads_the_file(tmp_path: Path) -> None:
    made = groups()
    write_parquet(tmp_path / "r.parquet", made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, on import
        datasets: Any = importlib.import_module("datasets")
        dataset = datasets.Dataset.from_parquet(str(tmp_path / "r.parquet"), cache_dir=str(tmp_path))
        assert_equal(made, from_table(dataset.with_format("arrow")[:]))
        rows = [i for i, name in enumerate(dataset["group_id"]) if name != "b"]
        assert_equal([made[0], made[3]], from_table(dataset.select(rows).with_format("arrow")[:]))


def test_a_file_is_replaced_by_a_complete_one_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    made = groups()
    write_parquet(path, made[:1])
    before = path.read_bytes()
    bad = make_group([make_episode([make_call(None, [1], [2], logprobs=[1.0])])])

    def killed() -> Iterator[RolloutGroup]:
        yield from made
        raise KeyboardInterrupt

    for given, error in (([*made, bad], ConversionError), (killed(), KeyboardInterrupt)):
        with pytest.raises(error):
            write_parquet(path, given)
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["r.parquet"]


@pytest.mark.parametrize("value", [float("nan"), (1, 2), object()])
def test_metadata_that_would_change_is_refused(value: Any) -> None:
    episode = dataclasses.replace(groups()[0].episodes[0], metadata={"x": value})
    with pytest.raises(ConversionError, match="the metadata of episode e0"):
        to_table([make_group([episode])])


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConversionError, match=r"need pyarrow: pip install 'tinkerscript\[datasets\]'"):
        to_table(groups())
