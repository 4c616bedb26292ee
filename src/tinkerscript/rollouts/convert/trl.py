"""What TRL's `rollout_func` returns (github.com/huggingface/trl, `GRPOTrainer`, TRL 1.16).

TRL takes the next `num_generations` rows for a group, and the reward from reward functions, which get every
further field by name: `reward_funcs=[lambda reward, **_: reward]`.

TRL compares with `logprobs` only where it corrects for the sampler (`use_vllm` and
`vllm_importance_sampling_correction`); otherwise it takes what it is given as sampled by its own weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.convert.traits import check_group_sizes, only_sequence

CARRIES = frozenset({"constrained", "several_calls"})


def to_trl(groups: Sequence[RolloutGroup], *, allow: Collection[str] = ()) -> dict[str, list[Any]]:
    """Convert groups of one size to parallel lists, one entry per episode.

    prompt_ids [P]; completion_ids, logprobs, env_mask [R], where the mask is 1 for tokens with loss; reward,
    group_id, episode_uuid. Raises ConversionError.
    """
    check_group_sizes(groups, "TRL's rollout")
    fields = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "group_id", "episode_uuid")
    rows: dict[str, list[Any]] = {name: [] for name in fields}
    for group in groups:
        for episode in group.episodes:
            rollout = only_sequence(episode, "TRL's rollout", CARRIES, allow)
            rows["prompt_ids"].append(rollout.prompt_tokens.tolist())
            rows["completion_ids"].append(rollout.response_tokens.tolist())
            rows["logprobs"].append(rollout.response_logprobs.tolist())
            rows["env_mask"].append(rollout.response_loss_mask.astype(int).tolist())
            rows["reward"].append(episode.reward)
            rows["group_id"].append(group.group_id)
            rows["episode_uuid"].append(episode.episode_uuid)
    return rows
