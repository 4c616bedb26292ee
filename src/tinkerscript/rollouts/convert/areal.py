"""AReaL's trajectories (github.com/inclusionAI/AReaL, `areal/workflow/rlvr.py`, AReaL 1.0): padded tensors.

AReaL adds a trajectory's reward at its last token and passes it back through the mask, so that token must
carry loss. It normalizes rewards over consecutive trajectories of one group.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutGroup, TrainingBatch, WeightedRollout
from tinkerscript.rollouts.convert.traits import only_sequence
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout

CARRIES = frozenset({"constrained", "several_calls"})

NOT_SAMPLED = -1
"""Version of a token that no policy sampled."""


def to_areal(group: RolloutGroup, *, pad_token_id: int = 0, allow: Collection[str] = ()) -> dict[str, Any]:
    """Convert a group of G episodes to one dictionary of tensors, unshifted, as a workflow returns it.

    input_ids, loss_mask, versions int32, logprobs float32 and attention_mask bool [G, T]; rewards float32
    [G]. A token's version is that of the weights that sampled it; of a call during which they changed, the
    older one. Raises ConversionError, and ModuleNotFoundError without torch.
    """
    import torch  # noqa: PLC0415 (numpy is enough for the rest of the package)

    rollouts = [_rollout(episode, allow) for episode in group.episodes]
    batch = TrainingBatch.of([WeightedRollout.uniform(r, 0.0) for r in rollouts], pad_token_id=pad_token_id)
    versions = np.full(batch.input_ids.shape, NOT_SAMPLED, np.int32)
    for row, rollout in zip(versions, rollouts, strict=True):
        for segment in rollout.segments:
            row[segment.start : segment.end] = min(segment.call.policy_versions)
    arrays = {
        "input_ids": batch.input_ids,
        "loss_mask": batch.loss_masks.astype(np.int32),
        "logprobs": batch.policy_logprobs,
        "versions": versions,
        "attention_mask": batch.attention_mask,
        "rewards": np.array(group.rewards, dtype=np.float32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _rollout(episode: EpisodeRollouts, allow: Collection[str]) -> Rollout:
    rollout = only_sequence(episode, "AReaL's trajectory", CARRIES, allow)
    if not rollout.loss_mask[-1]:
        raise ConversionError(
            f"AReaL's trajectory takes its reward at the last token; that of episode {episode.episode_uuid} "
            "carries no loss, so the reward would be lost: leave the episode out"
        )
    return rollout
