"""slime's samples (github.com/THUDM/slime, `slime/utils/types.py`), as inputs of `Sample.from_dict`.

slime computes advantages from the rewards of a group's samples, so an episode must be one sample.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.convert.traits import only_sequence
from tinkerscript.rollouts.rollout import EpisodeRollouts

CARRIES = frozenset({"constrained", "several_calls"})


def to_slime(
    group: RolloutGroup, *, group_index: int = 0, allow: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Convert a group's episodes to samples: tokens [T], response_length R, loss_mask, rollout_log_probs [R].

    `weight_versions` are the policy versions, one per call; `metadata` names group and episode. Raises
    ConversionError.
    """
    return [_sample(group, group_index, index, allow) for index in range(len(group.episodes))]


def _sample(group: RolloutGroup, group_index: int, index: int, allow: Collection[str]) -> dict[str, Any]:
    episode: EpisodeRollouts = group.episodes[index]
    rollout = only_sequence(episode, "slime's sample", CARRIES, allow)
    return {
        "group_index": group_index,
        "index": index,
        "tokens": rollout.tokens.tolist(),
        "response_length": len(rollout.response_tokens),
        "loss_mask": rollout.response_loss_mask.astype(int).tolist(),
        "rollout_log_probs": rollout.response_logprobs.tolist(),
        "reward": episode.reward,
        "status": "truncated" if rollout.is_truncated else "completed",
        "weight_versions": [str(segment.call.policy_version) for segment in rollout.segments],
        "metadata": {"group_id": group.group_id, "episode_uuid": episode.episode_uuid},
    }
