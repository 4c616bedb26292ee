"""Converters: what comes out is the calls, token by token; what would be lost is refused by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutBatch, TrainingBatch, WeightedRollout
from tinkerscript.rollouts.call import Call, full_prompts
from tinkerscript.rollouts.convert import areal, marin, prime_rl, skyrl, slime, tinker_datum, trl, verl
from tinkerscript.rollouts.convert.areal import to_areal
from tinkerscript.rollouts.convert.marin import to_marin_batch, to_marin_group
from tinkerscript.rollouts.convert.prime_rl import to_prime_rl
from tinkerscript.rollouts.convert.skyrl import to_skyrl
from tinkerscript.rollouts.convert.slime import to_slime
from tinkerscript.rollouts.convert.table import to_table
from tinkerscript.rollouts.convert.tinker_datum import to_datum, to_scoring_datum
from tinkerscript.rollouts.convert.traits import TRAITS
from tinkerscript.rollouts.convert.trl import to_trl
from tinkerscript.rollouts.convert.verl import to_verl
from tinkerscript.rollouts.rollout import EpisodeRollouts

ROOT = Path(__file__).parents[3]


def check_against_calls(calls: list[Call], rows: list[tuple[Any, Any, Any]]) -> None:
    """Rows of tokens, mask and log probabilities hold every call's sample once, after its own prompt."""
    prompts = full_prompts(calls)
    wanted = {(prompts[c.call_id], c.sampled): c for c in calls}
    found: list[str] = []
    for tokens, mask, logprobs in rows:
        ids, on = np.asarray(tokens, np.int32), np.asarray(mask).astype(bool)
        assert len(ids) == len(on) == len(logprobs)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(int), [0]])))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            call = wanted[(ids[:start].tobytes(), ids[start:end].tobytes())]
            assert np.asarray(logprobs, np.float32)[start:end].tobytes() == call.logprobs
            found.append(call.call_id)
        assert not np.asarray(logprobs)[~on].any()
    assert sorted(found) == sorted(call.call_id for call in calls)


@pytest.fixture
def several() -> list[EpisodeRollouts]:
    """Three episodes of four calls; no forks."""
    return [make_episode(random_calls(i), reward=float(i % 2), name=f"e{i}") for i in range(3)]


@pytest.fixture
def forked() -> list[EpisodeRollouts]:
    return [make_episode(random_calls(i, forks=2), reward=float(i % 2), name=f"e{i}") for i in range(3)]


@pytest.fixture
def single() -> list[EpisodeRollouts]:
    return [make_episode(random_calls(i, turns=1), reward=float(i % 2), name=f"e{i}") for i in range(3)]


def calls_of(episodes: list[EpisodeRollouts]) -> list[Call]:
    return [call for episode in episodes for call in episode.calls]


def test_a_datum_is_shifted_by_one_and_trains_only_what_was_sampled() -> None:
    first = make_call(None, [1, 2], [10, 11])
    (rollout,) = make_episode([first, make_call(first, [3], [12])]).rollouts
    datum = to_datum(WeightedRollout.uniform(rollout, 0.5))
    assert datum.model_input.to_ints() == [1, 2, 10, 11, 3]
    assert datum.loss_fn_inputs["target_tokens"].data == [2, 10, 11, 3, 12]
    assert datum.loss_fn_inputs["advantages"].data == [0, 0.5, 0.5, 0, 0.5]
    assert datum.loss_fn_inputs["logprobs"].data == pytest.approx([0, -0.1, -0.2, 0, -0.1])
    assert to_scoring_datum(rollout).loss_fn_inputs["weights"].data == [0, 1, 1, 0, 1]


def test_datums_hold_every_call_once(forked: list[EpisodeRollouts]) -> None:
    group = make_group(forked)
    rows: list[tuple[Any, Any, Any]] = []
    for weighted in group.weighted():
        datum = to_datum(weighted)
        inputs = {name: [0, *value.data] for name, value in datum.loss_fn_inputs.items()}
        assert datum.model_input.to_ints()[1:] == inputs["target_tokens"][1:-1]
        tokens = [*datum.model_input.to_ints(), inputs["target_tokens"][-1]]
        rows.append((tokens, np.asarray(inputs["advantages"]) != 0, inputs["logprobs"]))
    check_against_calls(calls_of(forked), rows)


def test_marins_rollouts_are_single_calls(
    single: list[EpisodeRollouts], several: list[EpisodeRollouts]
) -> None:
    rows: list[tuple[Any, Any, Any]] = []
    for made, episode in zip(to_marin_group(make_group(single), max_output_tokens=64), single, strict=True):
        prompt, response = made["prompt_tokens"], made["response_tokens"]
        assert prompt.dtype == response.dtype == np.int32
        np.testing.assert_array_equal(made["token_rewards"], np.full(len(response), episode.reward))
        assert made["episode_reward"] == episode.reward
        padding = np.zeros(len(prompt))
        rows.append(
            (
                np.concatenate([prompt, response]),
                np.concatenate([padding, np.ones(len(response))]),
                np.concatenate([padding, made["response_logprobs"]]),
            )
        )
    check_against_calls(calls_of(single), rows)
    with pytest.raises(ConversionError, match=r"Marin's Rollout cannot hold .*several_calls"):
        to_marin_group(make_group(several), max_output_tokens=64)
    with pytest.raises(ConversionError, match=r"is one call; episode e0 has 4: use"):
        to_marin_group(make_group(several), max_output_tokens=64, allow={"several_calls"})


def test_marins_training_batch_is_not_shifted(forked: list[EpisodeRollouts]) -> None:
    weighted = list(make_group(forked).weighted())
    batch = to_marin_batch(TrainingBatch.of(weighted, multiple_of=16), max_output_tokens=64)
    shape = batch["input_ids"].shape
    assert shape[0] == 9
    assert shape[1] % 16 == 0
    assert all(batch[name].shape == shape for name in ("position_ids", "loss_weights", "policy_logprobs"))
    rows = [
        (batch["input_ids"][i][:n], batch["loss_masks"][i][:n], batch["policy_logprobs"][i][:n])
        for i, n in enumerate(len(item.rollout.tokens) for item in weighted)
    ]
    check_against_calls(calls_of(forked), rows)
    for i, item in enumerate(weighted):
        n = len(item.rollout.tokens)
        np.testing.assert_array_equal(batch["loss_weights"][i][:n], item.advantages)
        assert not batch["loss_weights"][i][n:].any()
        assert not batch["loss_masks"][i][n:].any()
        assert batch["position_ids"][i].tolist() == [*range(n), *[0] * (shape[1] - n)]
    assert batch["temperature"].tolist() == [1.0] * 9


def test_verl_has_prompts_to_the_left(several: list[EpisodeRollouts]) -> None:
    batch = to_verl(RolloutBatch((make_group(several, "a"),)), pad_token_id=49)
    assert {str(value.dtype) for name, value in batch.items() if name != "uid"} == {
        "torch.int64",
        "torch.float32",
    }
    batch = {name: np.asarray(value) for name, value in batch.items()}
    rows: list[tuple[Any, Any, Any]] = []
    width = batch["prompts"].shape[1]
    for i, episode in enumerate(several):
        on = batch["attention_mask"][i].astype(bool)
        tokens = batch["input_ids"][i][on]
        assert batch["position_ids"][i][on].tolist() == list(range(len(tokens)))
        pad = np.zeros(int(on[:width].sum()))
        size = int(on[width:].sum())
        mask = np.concatenate([pad, batch["response_mask"][i][:size]])
        rows.append((tokens, mask, np.concatenate([pad, batch["rollout_log_probs"][i][:size]])))
        assert not batch["response_mask"][i][size:].any()
        assert batch["rm_scores"][i].sum() == batch["rm_scores"][i][size - 1] == episode.reward
    check_against_calls(calls_of(several), rows)
    assert batch["uid"].tolist() == ["a"] * 3
    with pytest.raises(ConversionError, match="more than response_length=3"):
        to_verl(RolloutBatch((make_group(several),)), response_length=3)


def test_verl_takes_token_rewards(single: list[EpisodeRollouts]) -> None:
    (rollout,) = single[0].rollouts
    shares = np.linspace(0, 1, len(rollout.response_tokens), dtype=np.float32)
    shaped = dataclasses.replace(single[0], rollouts=(rollout.rewarded(shares),))
    batch = to_verl(RolloutBatch((make_group([shaped]),)))
    np.testing.assert_array_equal(batch["rm_scores"][0].numpy(), shares)


STORED_SAMPLES: dict[str, dict[str, Any]] = {
    # `TrainingSample` of PrimeIntellect-ai/prime-rl, as public repositories hold it at three times: the
    # fields without a default, and those with one that we fill. Anything else would be refused.
    "parts": {
        "prompt_ids": list[int],
        "prompt_mask": list[bool],
        "completion_ids": list[int],
        "completion_mask": list[bool],
        "completion_logprobs": list[float],
        "completion_temperatures": list[float],
        "env_name": str,
        "advantage": float | None,
        "reward": float | None,
    },
    "flat": {
        "token_ids": list[int],
        "mask": list[bool],
        "logprobs": list[float],
        "temperatures": list[float],
        "env_name": str,
        "reward": float | None,
        "advantages": list[float] | None,
    },
    "channels": {
        "token_ids": list[int],
        "mask": list[bool],
        "logprobs": list[float],
        "temperatures": list[float],
        "env_name": str,
        "advantages": list[
            msgspec.defstruct(  # type: ignore[misc]
                "TrainingAdvantage", [("loss", str), ("values", list[float]), ("mask", list[bool])]
            )
        ],
        "reward": float | None,
    },
}


@pytest.mark.parametrize("layout", STORED_SAMPLES)
def test_prime_rl_has_every_field_of_its_stored_definitions(
    forked: list[EpisodeRollouts], layout: Any
) -> None:
    sample = msgspec.defstruct(
        "TrainingSample", list(STORED_SAMPLES[layout].items()), forbid_unknown_fields=True
    )
    for weighted in make_group(forked).weighted():
        rewarded = weighted.rollout.rewarded(0.5, "gsm8k", "ex_1")
        made = to_prime_rl(dataclasses.replace(weighted, rollout=rewarded), layout=layout)
        assert msgspec.to_builtins(msgspec.convert(made, sample)) == made
        assert (made["env_name"], made["reward"]) == ("gsm8k", 0.5)
        if layout == "parts":
            assert len(made["completion_temperatures"]) == len(made["completion_ids"])
            assert made["advantage"] == weighted.scalar
        else:
            assert made["temperatures"] == [1.0] * len(made["token_ids"])
            (channel,) = made["advantages"] if layout == "channels" else [{"values": made["advantages"]}]
            assert channel["values"] == weighted.advantages.tolist()


def test_marins_rollout_has_the_fields_of_its_published_definition() -> None:
    """Read from marin-community/marin, `marin/rl/types.py` and `marin/rl/decoding.py`."""
    call = make_call(None, [1], [2, 3], min_p=0.1, repetition_penalty=1.2, seed=4, created=1700000000)
    (made,) = to_marin_group(make_group([make_episode([call])]), max_output_tokens=64)
    assert made.keys() == {
        *("env_name", "env_example_id", "prompt_tokens", "response_tokens", "response_logprobs"),
        *("token_rewards", "episode_reward", "decoding", "is_truncated", "metadata"),
    }
    assert made["decoding"] == {
        "strategy": "sample",
        "temperature": 1.0,
        "top_k": None,
        "top_p": None,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": None,
        "frequency_penalty": None,
        "max_output_tokens": 64,
        "min_output_tokens": None,
        "stop_strings": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "seed": 4,
    }
    assert made["metadata"] == {"timestamp": 1.7e9, "weight_step": 0}


def test_the_other_forms_have_the_fields_of_published_versions(several: list[EpisodeRollouts]) -> None:
    """Read from TRL 1.16.0, SkyRL 0.3.0 and AReaL 1.0.4; `tests/acceptance/test_trainers.py` runs them."""
    group = make_group(several)
    required = {"prompt_ids", "completion_ids", "logprobs"}
    assert to_trl([group]).keys() == required | {"env_mask", "reward", "group_id", "episode_uuid"}
    made = to_skyrl(RolloutBatch((group,)), trajectory_id=lambda *each: each)
    assert made.keys() == {
        *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
        *("rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "rollout_expert_indices"),
        *("is_last_step", "env_metrics", "pixel_values", "image_grid_thw"),
    }
    tensors = to_areal(group)
    assert {name: (str(value.dtype), value.ndim) for name, value in tensors.items()} == {
        **dict.fromkeys(("input_ids", "loss_mask", "versions"), ("torch.int32", 2)),
        "logprobs": ("torch.float32", 2),
        "attention_mask": ("torch.bool", 2),
        "rewards": ("torch.float32", 1),
    }
    sampled = np.zeros(tensors["input_ids"].shape, bool)
    for row, episode in zip(sampled, several, strict=True):
        row[: len(episode.rollouts[0].tokens)] = episode.rollouts[0].sampled
    np.testing.assert_array_equal(tensors["versions"], np.where(sampled, 0, -1))


def test_token_rewards_are_skyrls_where_any_episode_has_them(several: list[EpisodeRollouts]) -> None:
    (rollout,) = several[0].rollouts
    shares = np.where(rollout.response_mask, 0.5, 0).astype(np.float32)
    shaped = dataclasses.replace(several[0], rollouts=(rollout.rewarded(shares),))
    made = to_skyrl(RolloutBatch((make_group([shaped, several[1]]),)), trajectory_id=lambda *each: each)
    assert made["rewards"][0] == shares.tolist()
    assert made["rewards"][1] == [0.0] * (len(made["response_ids"][1]) - 1) + [1.0]


def test_prime_rl_in_parts_has_one_advantage(forked: list[EpisodeRollouts]) -> None:
    item = next(iter(make_group(forked).weighted()))
    uneven = WeightedRollout(item.rollout, np.where(item.rollout.sampled, item.rollout.logprobs, 0))
    assert to_prime_rl(uneven)["advantages"] == uneven.advantages.tolist()
    with pytest.raises(ConversionError, match="token_advantages"):
        to_prime_rl(uneven, layout="parts")
    with pytest.raises(ConversionError, match="has one advantage; the tokens of episode e0 differ"):
        to_prime_rl(uneven, layout="parts", allow={"token_advantages"})


def test_slime_has_a_mask_over_the_response(several: list[EpisodeRollouts]) -> None:
    made = to_slime(make_group(several), group_index=7)
    rows: list[tuple[Any, Any, Any]] = []
    for sample, episode in zip(made, several, strict=True):
        prompt = len(sample["tokens"]) - sample["response_length"]
        zeros = [0] * prompt
        rows.append((sample["tokens"], zeros + sample["loss_mask"], zeros + sample["rollout_log_probs"]))
        assert (sample["reward"], sample["group_index"]) == (episode.reward, 7)
        assert sample["weight_versions"] == ["0"] * 4
    check_against_calls(calls_of(several), rows)
    cut = make_episode([make_call(None, [1], [2, 3], stop_reason="length")])
    assert to_slime(make_group([cut]))[0]["status"] == "truncated"


def convert_all(episode: EpisodeRollouts, **allow: Any) -> dict[str, str | None]:
    """Form -> the error of converting a group of this episode and a plain one; None if it went through."""
    group = make_group([episode, make_episode([make_call(None, [1], [2, 3])], reward=0.0)])
    weighted = list(group.weighted())
    forms: dict[str, Any] = {
        "tinker": lambda: [to_datum(item, **allow) for item in weighted],
        "marin rollout": lambda: to_marin_group(group, max_output_tokens=9, **allow),
        "marin batch": lambda: to_marin_batch(TrainingBatch.of(weighted), max_output_tokens=9, **allow),
        "verl": lambda: to_verl(RolloutBatch((group,)), **allow),
        "prime-rl": lambda: [to_prime_rl(item, layout="parts", **allow) for item in weighted],
        "prime-rl flat": lambda: [to_prime_rl(item, **allow) for item in weighted],
        "slime": lambda: to_slime(group, **allow),
        "TRL": lambda: to_trl([group], **allow),
        "SkyRL": lambda: to_skyrl(RolloutBatch((group,)), trajectory_id=lambda *each: each, **allow),
        "AReaL": lambda: to_areal(group, **allow),
    }
    results: dict[str, str | None] = {}
    for form, convert in forms.items():
        try:
            convert()
            results[form] = None
        except ConversionError as error:
            results[form] = str(error)
    return results


CARRIES = {
    "tinker": tinker_datum.CARRIES,
    "marin rollout": marin.ROLLOUT_CARRIES,
    "marin batch": marin.BATCH_CARRIES,
    "verl": verl.CARRIES,
    "prime-rl": prime_rl.CARRIES,
    "prime-rl flat": prime_rl.FLAT_CARRIES,
    "slime": slime.CARRIES,
    "TRL": trl.CARRIES,
    "SkyRL": skyrl.CARRIES,
    "AReaL": areal.CARRIES,
}


def with_trait(trait: str) -> EpisodeRollouts:
    """An episode that has this trait, and as few others as there can be."""
    match trait:
        case "several_calls":
            return make_episode(random_calls(1))
        case "several_sequences":
            return make_episode([make_call(None, [1], [2]), make_call(None, [1], [3])])
        case "temperature":
            return make_episode([make_call(None, [1], [2, 3], temperature=0.7)])
        case "mixed_sampling":
            first = make_call(None, [1], [2], temperature=0.7)
            return make_episode([first, make_call(first, [1], [2])])
        case "top_p":
            return make_episode([make_call(None, [1], [2, 3], top_p=0.9)])
        case "top_k":
            return make_episode([make_call(None, [1], [2, 3], top_k=5)])
        case "min_p":
            return make_episode([make_call(None, [1], [2, 3], min_p=0.1)])
        case "repetition_penalty":
            return make_episode([make_call(None, [1], [2, 3], repetition_penalty=1.1)])
        case "constrained":
            return make_episode([make_call(None, [1], [2, 3], constrained=bytes([1, 0]))])
        case "logprob_kind":
            return make_episode([make_call(None, [1], [2, 3], logprob_kind="unknown")])
        case _:
            plain = make_episode([make_call(None, [1], [2, 3])])
            shaped = plain.rollouts[0].rewarded([0.25, 0.75])
            return dataclasses.replace(plain, rollouts=(shaped,))


@pytest.mark.parametrize("trait", TRAITS)
def test_what_a_form_does_not_carry_is_refused_by_name(trait: str) -> None:
    for form, error in convert_all(with_trait(trait)).items():
        has_weights = form in ("tinker", "marin batch", "prime-rl", "prime-rl flat")
        # Advantages and rewards are two sides of one thing: a form has one of them.
        name = "token_advantages" if has_weights and trait == "token_rewards" else trait
        name = "token_rewards" if not has_weights and trait == "token_advantages" else name
        if name in CARRIES[form]:
            assert error is None or name not in error, (form, trait, error)
        else:
            assert error is not None, (form, trait)
            assert f"{name} (" in error


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"logprobs": [float("nan"), -1.0]}, "logprob_not_finite"),
        ({"logprobs": [0.5, -1.0]}, "logprob_positive"),
        ({"logprobs": [-9999.0, -1.0]}, "logprob_sentinel"),
        ({"logprobs": [0.0, 0.0]}, "logprobs_all_zero"),
        ({"ids_from": "text"}, "ids_retokenised"),
    ],
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


def test_a_reward_that_would_be_lost_at_a_masked_end_is_refused_or_moved() -> None:
    """AReaL and estimators of verl pass a reward back through the mask."""
    episode = make_episode([make_call(None, [1], [2, 3, 4], constrained=bytes([0, 0, 2]))], reward=2.0)
    with pytest.raises(ConversionError, match="the reward would be lost"):
        to_areal(make_group([episode]))
    assert to_verl(RolloutBatch((make_group([episode]),)))["rm_scores"].tolist() == [[0.0, 2.0, 0.0]]


def test_trl_needs_groups_of_one_size(several: list[EpisodeRollouts]) -> None:
    with pytest.raises(ConversionError, match=r"must be one for all: got \[1, 2\]"):
        to_trl([make_group(several[:2]), make_group(several[2:])])


def test_a_loss_may_be_accepted_by_name_and_by_no_other() -> None:
    assert convert_all(with_trait("top_p"), allow={"top_p"}) == dict.fromkeys(CARRIES)
    with pytest.raises(ConversionError, match=r"allow: \['top-p'\] are not traits; the traits are"):
        to_slime(make_group([with_trait("top_p")]), allow={"top-p"})


def test_the_page_says_what_each_form_refuses() -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    for form, carries in CARRIES.items():
        row = re.search(rf"^\| {re.escape(form)} \|.*\|([^|]*)\|$", page, re.MULTILINE)
        assert row is not None, form
        named = set(re.findall(r"`(\w+)`", row[1]))
        kind = (
            "token_rewards"
            if form in ("tinker", "marin batch", "prime-rl", "prime-rl flat")
            else "token_advantages"
        )
        assert named == set(TRAITS) - carries - {kind}, form
