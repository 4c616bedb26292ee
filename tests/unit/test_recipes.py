"""What recipes set, what wins over them, and what they are combined with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tinkerscript.config import RECIPES, RunConfig, TrainingConfig, dump_config, parse_config
from tinkerscript.errors import ConfigError
from tinkerscript.train.policy_loss import check_loss

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")

NEEDED = {"gdpo": "reward_weights: {correct: 1, format: 0.2}"}
"""Keys that a recipe needs from its user."""


def parsed(training: str) -> TrainingConfig:
    return parse_config(f"{{task: {{name: t}}, training: {{{training}}}}}", source="run.yaml").training


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_its_keys_and_is_itself_after_a_round_trip(name: str) -> None:
    given = f"{{task: {{name: t}}, training: {{recipe: {name}, {NEEDED.get(name, '')}}}}}"
    config = parse_config(given, source="run.yaml")
    found = config.training.model_dump(mode="json")
    for key, value in RECIPES[name].keys.items():
        assert found[key] == value if key != "rollout_correction" else found[key].items() >= value.items()
    assert parse_config(dump_config(config), source="config.yaml") == config
    check_loss(config)


def test_given_keys_win_also_inside_a_section() -> None:
    training = parsed("recipe: grpo, clip_high: 0.3, loss_config: {entropy: 0.01}")
    assert (training.clip_low, training.clip_high) == (0.2, 0.3)
    assert training.loss_config == {"kl_k3": 0.04, "entropy": 0.01}
    assert parsed("recipe: grpo, loss_config: {kl_k3: 0}").kl_losses == []
    replaced = parsed("recipe: icepop, rollout_correction: {icepop: null, tis: 2}").rollout_correction
    assert (replaced.icepop, replaced.tis) == (None, 2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("recipe: grop", "training.recipe: input should be .*'grpo'"),
        ("recipe: gdpo", "gdpo adds up several scores: name them and their weights in reward_weights"),
        ("recipe: pass_k, group_size: 3", "pass_k: 4 takes sets of 4 episodes .* group_size is 3: raise"),
        ("pass_k: 2, advantage_baseline: leave_one_out", "leave out advantage_baseline: leave_one_out"),
        ("pass_k: 2, advantage_scale: group_mean", "leave out advantage_scale: group_mean"),
        ("pass_k: 2, reward_weights: {a: 1}", "leave out reward_weights"),
        ("advantage_baseline: none", "none takes the batch's mean .* set batch_deviation"),
        ("reward_weights: {a: 1}, advantage_scale: group_deviation", "already divides each score by its own"),
        ("rollout_correction: {bypass: true}, kl_penalty_coef: 0.1", "leave out bypass, or take the"),
        ("recipe: gdpo, reward_weights: {a: 1}, overlong_buffer: 0.2", "is taken off the reward"),
        ("reward_weights: {a: 1}, length_penalty: {turn: 1}", "trains on reward_weights in its place"),
        ("distillation: {teacher: t}, length_penalty: {token: 1}", "length_penalty .* on a teacher alone"),
        ("length_penalty: {step: 1}", "length_penalty.step"),
        ("length_penalty: {turn: -1}", "length_penalty.turn: input should be greater than or equal to 0"),
        ("rollout_correction: {bypass: true}, top_entropy: 0.2", "top_entropy: the entropies come from"),
        ("rollout_correction: {bypass: true}, adaptive_entropy: {target: 1}", "entropy: the entropies"),
        ("adaptive_entropy: {target: 1}, loss_config: {entropy: 0.1}", "loss_config.entropy: 0.1 both set"),
        ("adaptive_entropy: {delta: 1}", "adaptive_entropy.delta needs adaptive_entropy.target"),
        ("distillation: {top_k: 3}", "top_k: 3 takes the most probable tokens of a teacher: set teacher"),
        ("distillation: {teacher: t, top_k: 3}, top_entropy: 0.5", "all tokens, and top_entropy changes"),
        ("distillation: {teacher: t, top_k: 3}, rollout_correction: {tis: 2}", "and rollout_correction"),
        ("group_size: 1", "group_size: 1 leaves nothing to compare"),
        ("advantage_baseline: sample_mean, advantage_scale: group_deviation, group_size: 1", "group_size: 1"),
        ("advantage_baseline: sample_mean, judge: {function: a.py:b}, group_size: 1", "without a judge"),
        ("recipe: spo, batch_rule: differing_groups", "on which advantage_baseline: sample_mean trains"),
        ("recipe: reinforce_pp, group_size: 1, batch_rule: differing_groups", "baseline: none trains"),
        ("recipe: spo, replay_uses: 2", "advantage_baseline: sample_mean does not go with replay_uses: 2"),
        ("advantage_scale: running_deviation, reward_weights: {a: 1}", "does not go with reward_weights"),
        ("advantage_scale: running_deviation, pass_k: 2", "leave out advantage_scale: running_deviation"),
        ("recipe: spo, credit: {level: state}", "sample_mean does not go with credit .level: state, disc"),
        ("recipe: spo, credit: {discount: 0.9}", "sample_mean does not go with credit .*discount: 0.9"),
        ("recipe: spo, distillation: {teacher: t}", "sample_mean does not go with distillation without"),
    ],
)
def test_contradictory_keys_are_refused_by_name(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(given)


def test_groups_of_one_train_if_nothing_is_compared_within_them() -> None:
    for given in ("recipe: spo", "recipe: reinforce_pp", "advantage_baseline: running_mean"):
        assert parsed(f"{given}, group_size: 1").min_group == 1
    assert parsed("recipe: grpo").min_group == 2


def test_the_mean_of_a_sample_needs_samples() -> None:
    with pytest.raises(ConfigError, match=r"sample_mean is the mean of a task's sample: set task\.name"):
        parse_config("training: {advantage_baseline: sample_mean}", source="run.yaml")


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"loss_config": {"entropy": 0.1}}, r"training\.loss_config\.entropy needs the embedded engine"),
        ({"recipe": "grpo"}, r"training\.loss_config\.kl_k3 needs the embedded engine"),
        ({"rollout_correction": {"off_policy_mask": 0.1}}, "off_policy_mask needs the embedded engine"),
        ({"top_entropy": 0.2}, "training.top_entropy needs the embedded engine"),
        ({"adaptive_entropy": {"target": 1}}, "training.adaptive_entropy needs the embedded engine"),
        ({"kl_reference_every": 2}, "kl_reference_every renews the reference of a divergence, .* has none"),
        ({"recipe": "sapo"}, "'sapo' needs the embedded engine"),
    ],
)
def test_what_a_service_cannot_train_with_is_refused_by_name(training: dict[str, Any], message: str) -> None:
    config = RunConfig.model_validate({"engine": {"backend": "tinker"}, "training": training})
    with pytest.raises(ConfigError, match=message):
        check_loss(config)


def test_the_page_has_each_recipe_as_it_is() -> None:
    table = PAGE.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, flags=re.MULTILINE))
    assert rows.keys() == RECIPES.keys()
    for name, recipe in RECIPES.items():
        for outer, inner in recipe.keys.items():
            for key, value in (inner if isinstance(inner, dict) else {outer: inner}).items():
                text = str(value).lower() if isinstance(value, bool) else value
                assert f"`{key}: {text}`" in rows[name], (name, key)
        assert recipe.source.rpartition("arXiv:")[2] in PAGE
