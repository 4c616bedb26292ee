"""SkyRL's `GeneratorOutput` (github.com/NovaSky-AI/SkyRL, `skyrl/train/generators/base.py`, SkyRL 0.3).

SkyRL computes advantages from the rewards of rows with the same `instance_id`, so an episode must be one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutBatch
from tinkerscript.rollouts.convert.traits import only_sequence, reward_at_end

CARRIES = frozenset({"constrained", "several_calls", "token_rewards"})


def to_skyrl(
    batch: RolloutBatch, *, trajectory_id: Callable[[str, int], Any], allow: Collection[str] = ()
) -> dict[str, Any]:
    """Convert a batch of B episodes to the fields of `GeneratorOutput`, each a list of B.

    prompt_token_ids [P]; response_ids, loss_masks, rollout_logprobs [R]; rewards: the episodes', or those of
    the tokens [R] if any episode has token rewards or ends without loss. `trajectory_id`: SkyRL's class
    `TrajectoryID`, called with the group's id and the episode's number in it. Raises ConversionError.
    """
    rows = [
        (group.group_id, number, episode, only_sequence(episode, "SkyRL's output", CARRIES, allow))
        for group in batch.groups
        for number, episode in enumerate(group.episodes)
    ]
    if not rows:
        raise ConversionError("the batch has no episodes")
    # SkyRL puts an episode's reward on its last token, where some estimators would lose it to the mask.
    by_token = any(rollout.shaped or not rollout.loss_mask[-1] for *_, rollout in rows)
    return {
        "prompt_token_ids": [rollout.prompt_tokens.tolist() for *_, rollout in rows],
        "response_ids": [rollout.response_tokens.tolist() for *_, rollout in rows],
        "rewards": [
            reward_at_end(episode, rollout).tolist() if by_token else episode.reward
            for _, _, episode, rollout in rows
        ],
        "loss_masks": [rollout.response_loss_mask.astype(int).tolist() for *_, rollout in rows],
        "stop_reasons": [rollout.segments[-1].call.stop_reason for *_, rollout in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [rollout.response_logprobs.tolist() for *_, rollout in rows],
        "trajectory_ids": [trajectory_id(group_id, number) for group_id, number, *_ in rows],
        "trajectory_generation_times": None,
        "rollout_expert_indices": None,
        "is_last_step": None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }
