"""slime's samples (github.com/THUDM/slime, `slime/utils/types.py`), as inputs of `Sample.from_dict`.

slime computes advantages from the rewards of a group's samples, so an episode must be one sample.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.convert.traits import check_episode_carried
from tinkerscript.rollouts.rollout import EpisodeRollouts

CARRIES = frozenset({"several_calls"})


def to_slime(
    group: RolloutGroup, *, group_index: int = 0, allow: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Convert a group's episodes to samples: tokens [T], response_length R, loss_mask, rollout_log_probs [R].

    `weight_versions` are the policy versions, one per call. Raises ConversionError.
    """
    return [_sample(episode, group_index, index, allow) for index, episode in enumerate(group.episodes)]


def _sample(episode: EpisodeRollouts, group_index: int, index: int, allow: Collection[str]) -> dict[str, Any]:
    check_episode_carried(episode, "slime's sample", CARRIES, allow)
    if len(episode.rollouts) != 1:
        raise ConversionError(f"episode {episode.episode_uuid} has {len(episode.rollouts)} sequences")
    (rollout,) = episode.rollouts
    truncated = rollout.segments[-1].call.stop_reason == "length"
    return {
        "group_index": group_index,
        "index": index,
        "tokens": rollout.tokens.tolist(),
        "response_length": len(rollout.response_tokens),
        "loss_mask": rollout.response_mask.astype(int).tolist(),
        "rollout_log_probs": rollout.response_logprobs.tolist(),
        "reward": episode.reward,
        "status": "truncated" if truncated else "completed",
        "weight_versions": [str(segment.call.policy_version) for segment in rollout.segments],
    }
