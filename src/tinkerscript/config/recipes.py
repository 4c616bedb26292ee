"""`RECIPES`: the keys of `training` that published algorithms set, by the name of `training.recipe`.

The user's keys win. Sizes, lengths and learning rates, which a paper ties to its model or data, are left out.
docs/recipes.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

RecipeName = Literal[
    "",
    "grpo",
    "dr_grpo",
    "rloo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "ppo_clip",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "spo",
    "maxrl",
    "gdpo",
    "pass_k",
    "clip_cov",
    "kl_cov",
    "icepop",
]


@dataclass(frozen=True, slots=True)
class Recipe:
    keys: Mapping[str, Any]
    """Of `training`."""

    source: str


PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
BY_GROUP = {"advantage_baseline": "group_mean", "advantage_scale": "group_deviation"}
PPO = {"loss_fn": "ppo", **PPO_CLIP}

RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe(
        {**BY_GROUP, **PPO, "loss_config": {"kl_k3": 0.04}, "loss_mean": "tokens_then_sequences"},
        "Shao et al. 2024, arXiv:2402.03300",
    ),
    "dr_grpo": Recipe(
        {
            "advantage_baseline": "group_mean",
            "advantage_scale": "none",
            **PPO,
            "loss_mean": "episodes",
        },
        "Liu et al. 2025, arXiv:2503.20783",
    ),
    "rloo": Recipe(
        {
            "advantage_baseline": "leave_one_out",
            "advantage_scale": "none",
            "loss_fn": "importance_sampling",
            "loss_mean": "sequences",
        },
        "Ahmadian et al. 2024, arXiv:2402.14740",
    ),
    "dapo": Recipe(
        {
            **BY_GROUP,
            "batch_rule": "differing_groups",
            "loss_fn": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "loss_mean": "tokens",
            "mask_truncated": True,
            "overlong_buffer": 0.2,
        },
        "Yu et al. 2025, arXiv:2503.14476",
    ),
    "gspo": Recipe(
        {
            **BY_GROUP,
            "loss_fn": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss_mean": "sequences",
            "minibatches": 4,
        },
        "Zheng et al. 2025, arXiv:2507.18071",
    ),
    "cispo": Recipe(
        {**BY_GROUP, "loss_fn": "cispo", "clip_low": 1.0, "clip_high": 4.0, "loss_mean": "tokens"},
        "MiniMax-M1 2025, arXiv:2506.13585; the clip of Khatri et al. 2025, arXiv:2510.13786",
    ),
    "sapo": Recipe(
        {
            **BY_GROUP,
            "loss_fn": "sapo",
            "loss_config": {"tau_pos": 1.0, "tau_neg": 1.05},
            "loss_mean": "tokens_then_sequences",
        },
        "Gao et al. 2025, arXiv:2511.20347",
    ),
    "dppo": Recipe(
        {
            **BY_GROUP,
            "loss_fn": "dppo_tv",
            "loss_config": {"delta_low": 0.2, "delta_high": 0.2},
            "loss_mean": "tokens",
        },
        "Qi et al. 2026, arXiv:2602.04879",
    ),
    "ppo_clip": Recipe(
        {
            "advantage_baseline": "group_mean",
            "advantage_scale": "batch_deviation",
            **PPO,
            "loss_mean": "tokens",
        },
        "Schulman et al. 2017, arXiv:1707.06347, with the group's mean in place of a critic",
    ),
    "reinforce_pp": Recipe(
        {"advantage_baseline": "none", "advantage_scale": "batch_deviation", **PPO, "loss_mean": "tokens"},
        "Hu et al. 2025, arXiv:2501.03262",
    ),
    "reinforce_pp_baseline": Recipe(
        {
            "advantage_baseline": "group_mean",
            "advantage_scale": "batch_deviation",
            **PPO,
            "loss_mean": "tokens",
        },
        "Hu et al. 2025, arXiv:2501.03262",
    ),
    "spo": Recipe(
        {
            "advantage_baseline": "sample_mean",
            "advantage_scale": "batch_deviation",
            "loss_fn": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "loss_mean": "tokens",
        },
        "Xu and Ding 2025, arXiv:2509.13232",
    ),
    "maxrl": Recipe(
        {
            "advantage_baseline": "group_mean",
            "advantage_scale": "group_mean",
            "loss_fn": "importance_sampling",
            "loss_mean": "tokens",
        },
        "Tajwar et al. 2026, arXiv:2602.02710",
    ),
    "gdpo": Recipe(
        {
            "advantage_baseline": "group_mean",
            "advantage_scale": "batch_deviation",
            **PPO,
            "loss_mean": "tokens_then_sequences",
        },
        "Liu et al. 2026, arXiv:2601.05242",
    ),
    "pass_k": Recipe(
        {**BY_GROUP, "pass_k": 4, **PPO, "loss_mean": "tokens"},
        "Chen et al. 2025, arXiv:2508.10751",
    ),
    "clip_cov": Recipe(
        {
            **BY_GROUP,
            "loss_fn": "clip_cov",
            **PPO_CLIP,
            "loss_config": {"cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
            "loss_mean": "tokens",
        },
        "Cui et al. 2025, arXiv:2505.22617",
    ),
    "kl_cov": Recipe(
        {
            **BY_GROUP,
            "loss_fn": "kl_cov",
            "loss_config": {"kl": 1.0, "cov_share": 2e-4},
            "loss_mean": "tokens",
        },
        "Cui et al. 2025, arXiv:2505.22617",
    ),
    "icepop": Recipe(
        {
            **BY_GROUP,
            **PPO,
            "loss_mean": "tokens",
            "rollout_correction": {"icepop": [0.5, 5.0]},
        },
        "Ling Team 2025, arXiv:2510.18855",
    ),
}


def with_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    recipe = RECIPES.get(str(given.get("recipe", "")))
    return _over(recipe.keys, given) if recipe else dict(given)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            found[name] = _over(below[name], cast("Mapping[str, Any]", above[name]))
    return found
