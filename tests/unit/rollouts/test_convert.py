"""Converters: a format holds the rollout, and what would be lost is refused by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutBatch, WeightedRollout
from tinkerscript.rollouts.call import PlacedImage
from tinkerscript.rollouts.parquet import to_table
from tinkerscript.rollouts.rollout import EpisodeRollouts
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
    """Read from TRL 1.16.0; `tests/acceptance/test_trainers.py` runs it."""
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
