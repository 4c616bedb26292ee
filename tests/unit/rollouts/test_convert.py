"""Converters: a format holds the rollout, and what would be lost is refused by name. Tables give back all."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.errors import ConversionError
from tinkerscript.rollouts import parquet
from tinkerscript.rollouts.advantages import RolloutBatch, RolloutGroup, WeightedRollout
from tinkerscript.rollouts.call import PlacedImage
from tinkerscript.rollouts.parquet import from_table, read_parquet, to_table, write_parquet
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout
from tinkerscript.rollouts.trainers import (
    TRAITS,
    to_datum,
    to_scoring_datum,
    to_trl,
    to_verl,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def several() -> list[EpisodeRollouts]:
    """Three episodes of four calls; no forks."""
    return [make_episode(random_calls(i), reward=float(i % 2), name=f"e{i}") for i in range(3)]


def test_a_datum_is_shifted_by_one_and_trains_only_what_was_sampled() -> None:
    first = make_call(None, [1, 2], [10, 11])
    (rollout,) = make_episode([first, make_call(first, [3], [12])]).rollouts
    datum = to_datum(WeightedRollout.uniform(rollout, 0.5))
    assert datum.model_input.to_ints() == [1, 2, 10, 11, 3]
    assert datum.loss_fn_inputs["target_tokens"].data == [2, 10, 11, 3, 12]
    assert datum.loss_fn_inputs["advantages"].data == [0, 0.5, 0.5, 0, 0.5]
    assert datum.loss_fn_inputs["logprobs"].data == pytest.approx([0, -0.1, -0.2, 0, -0.1])
    assert to_scoring_datum(rollout).loss_fn_inputs["weights"].data == [0, 1, 1, 0, 1]


def test_verl_pads_prompts_on_the_left_and_responses_on_the_right(several: list[EpisodeRollouts]) -> None:
    made = to_verl(RolloutBatch((make_group(several, "a"),)), pad_token_id=49)
    assert {str(value.dtype) for name, value in made.items() if name != "uid"} == {
        "torch.int64",
        "torch.float32",
    }
    batch = {name: np.asarray(value) for name, value in made.items()}
    for row, episode in enumerate(several):
        there = batch["attention_mask"][row].astype(bool)
        tokens = episode.rollouts[0].tokens
        assert batch["input_ids"][row][there].tolist() == tokens.tolist()
        assert (batch["input_ids"][row][~there] == 49).all()
        assert batch["position_ids"][row][there].tolist() == list(range(len(tokens)))
        assert batch["rm_scores"][row].sum() == episode.reward
    assert batch["uid"].tolist() == ["a"] * 3
    with pytest.raises(ConversionError, match="more than response_length=3"):
        to_verl(RolloutBatch((make_group(several),)), response_length=3)


def test_verl_takes_token_rewards() -> None:
    batch = to_verl(RolloutBatch((make_group([with_trait("token_rewards")]),)))
    assert batch["rm_scores"].tolist() == [[0.25, 0.75]]


def test_trl_has_the_fields_of_its_published_version(several: list[EpisodeRollouts]) -> None:
    """Read from TRL 1.16.0; `tests/peers/test_peer_recipes.py` runs it."""
    group = make_group(several)
    required = {"prompt_ids", "completion_ids", "logprobs"}
    assert to_trl([group]).keys() == required | {"env_mask", "reward", "group_id", "episode_uuid"}


CARRIES: dict[str, frozenset[str]] = {
    "Tinker": frozenset({"several_sequences", "token_rewards"}),
    "verl": frozenset({"token_rewards"}),
    "TRL": frozenset(),
}


def convert_all(episode: EpisodeRollouts, allow: Collection[str] = ()) -> dict[str, str | None]:
    """Form -> the error of converting a group of this episode and a plain one; None if it went through."""
    group = make_group([episode, make_episode([make_call(None, [1], [2, 3])], reward=0.0)])
    batch = RolloutBatch((group,))
    forms: dict[str, Any] = {
        "Tinker": lambda: [to_datum(item, allow=allow) for item in group.weighted()],
        "verl": lambda: to_verl(batch, allow=allow),
        "TRL": lambda: to_trl([group], allow=allow),
    }
    results: dict[str, str | None] = {}
    for form, convert in forms.items():
        try:
            convert()
            results[form] = None
        except ConversionError as error:
            results[form] = str(error)
    return results


TRAITS_OF_A_CALL: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logprob_kind": {"logprob_kind": "unknown"},
    "images": {"images": [PlacedImage(0, b"file")]},
}


def with_trait(trait: str) -> EpisodeRollouts:
    """An episode that has this trait, and as few others as there can be."""
    plain = make_episode([make_call(None, [1], [2, 3], **TRAITS_OF_A_CALL.get(trait, {}))])
    if trait == "several_sequences":
        return make_episode([make_call(None, [1], [2]), make_call(None, [1], [3])])
    if trait == "mixed_sampling":
        first = make_call(None, [1], [2], temperature=0.7)
        return make_episode([first, make_call(first, [1], [2])])
    if trait == "token_rewards":
        return dataclasses.replace(plain, rollouts=(plain.rollouts[0].rewarded([0.25, 0.75]),))
    return plain


@pytest.mark.parametrize("trait", TRAITS)
def test_what_a_form_does_not_carry_is_refused_by_name(trait: str) -> None:
    for form, error in convert_all(with_trait(trait)).items():
        if trait in CARRIES[form]:
            assert error is None, (form, trait, error)
        else:
            assert error is not None, (form, trait)
            assert f"{trait} (" in error


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"logprobs": [float("nan"), -1.0]}, "logprob_not_finite"), ({"ids_from": "text"}, "ids_retokenised")],
)
def test_no_form_takes_what_must_not_train(wrong: dict[str, Any], name: str) -> None:
    episode = make_episode([make_call(None, [1], [2, 3], **wrong)])
    for form, error in convert_all(episode, allow=set(TRAITS)).items():
        assert error is not None, form
        assert name in error
    with pytest.raises(ConversionError, match=name):
        to_table([make_group([episode])])


def test_no_form_takes_a_sampled_token_without_a_prefix() -> None:
    for error in convert_all(make_episode([make_call(None, [], [2, 3])])).values():
        assert "prompt_empty" in str(error)


def test_an_advantage_on_a_token_without_loss_is_refused() -> None:
    (rollout,) = make_episode([make_call(None, [1], [2, 3], constrained=bytes([0, 2]))]).rollouts
    with pytest.raises(ConversionError, match="0 where a token carries no loss"):
        to_datum(WeightedRollout(rollout, np.ones(3, np.float32)))


def test_a_reward_that_would_be_lost_at_a_masked_end_is_moved() -> None:
    """Estimators of verl pass a reward back through the mask."""
    episode = make_episode([make_call(None, [1], [2, 3, 4], constrained=bytes([0, 0, 2]))], reward=2.0)
    assert to_verl(RolloutBatch((make_group([episode]),)))["rm_scores"].tolist() == [[0.0, 2.0, 0.0]]


def test_a_loss_may_be_accepted_by_name_and_by_no_other() -> None:
    assert convert_all(with_trait("top_p"), allow={"top_p"}) == dict.fromkeys(CARRIES)
    forked = convert_all(with_trait("several_sequences"), allow={"several_sequences"})
    assert "has one row for an episode" in str(forked["verl"])
    with pytest.raises(ConversionError, match=r"allow: \['top-p'\] are not traits; the traits are"):
        to_trl([make_group([with_trait("top_p")])], allow={"top-p"})


def test_the_page_says_what_each_form_refuses() -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    for form, carries in CARRIES.items():
        row = re.search(rf"^\| {form} \| `to_.*\|([^|]*)\|$", page, re.MULTILINE)
        assert row is not None, form
        refused = {"several_sequences", "token_rewards"} - carries
        assert set(re.findall(r"`(\w+)`", row[1])) == refused, form


# Tables: Parquet files and Hugging Face datasets


def groups_of_all_kinds() -> list[RolloutGroup]:
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
    made = groups_of_all_kinds()
    rows = sum(max(1, len(episode.rollouts)) for group in made for episode in group.episodes)
    assert rows > 12
    assert write_parquet(tmp_path / "r.parquet", iter(made)) == rows
    assert_equal(made, list(read_parquet(tmp_path / "r.parquet")))


def test_a_hugging_face_dataset_reads_the_file(tmp_path: Path) -> None:
    made = groups_of_all_kinds()
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
    made = groups_of_all_kinds()
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
    episode = dataclasses.replace(groups_of_all_kinds()[0].episodes[0], metadata={"x": value})
    with pytest.raises(ConversionError, match="the metadata of episode e0"):
        to_table([make_group([episode])])


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConversionError, match=r"need pyarrow: pip install 'tinkerscript\[datasets\]'"):
        to_table(groups_of_all_kinds())
