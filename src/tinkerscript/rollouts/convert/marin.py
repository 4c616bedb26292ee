"""Marin's `Rollout` and `TrainingBatch` (github.com/marin-community/marin, `marin/rl/types.py`).

The results are dictionaries of Marin's fields with numpy arrays, from which Marin's classes can be
constructed. Marin's Rollout has no response mask, so it holds a single call; its TrainingBatch has one, and
is not shifted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutGroup, TrainingBatch
from tinkerscript.rollouts.convert.traits import check_weights_carried, only_sequence
from tinkerscript.rollouts.rollout import EpisodeRollouts

ROLLOUT_CARRIES = frozenset({"token_rewards", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
BATCH_CARRIES = frozenset(
    {"constrained", "several_calls", "several_sequences", "token_advantages", "temperature", "top_k"}
)


def to_marin_group(
    group: RolloutGroup, *, max_output_tokens: int, allow: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Convert a group's episodes, one call each, to the fields of Marin's Rollout, `RolloutDecodingTrace` and
    `RolloutMetadata`.

    `max_output_tokens`: the calls' token limit, which Marin stores and a `Call` does not; nor does it store
    stop strings and ids, which are None. `weight_step` is the policy version. Raises ConversionError.
    """
    return [_rollout(episode, max_output_tokens, allow) for episode in group.episodes]


def _rollout(episode: EpisodeRollouts, max_output_tokens: int, allow: Collection[str]) -> dict[str, Any]:
    rollout = only_sequence(episode, "Marin's Rollout", ROLLOUT_CARRIES, allow)
    if len(rollout.segments) != 1:
        # Impossible even if allowed: Marin would train on tool output.
        raise ConversionError(
            f"Marin's Rollout is one call; episode {episode.episode_uuid} has {len(rollout.segments)}: use "
            "to_marin_batch"
        )
    call = rollout.segments[0].call
    sampled = len(rollout.response_tokens)
    rewards = rollout.token_rewards if rollout.shaped else np.full(sampled, episode.reward, np.float32)
    return {
        "env_name": rollout.env_name,
        "env_example_id": rollout.env_example_id,
        "prompt_tokens": rollout.prompt_tokens,
        "response_tokens": rollout.response_tokens,
        "response_logprobs": rollout.response_logprobs,
        "token_rewards": rewards,
        "episode_reward": episode.reward,
        "is_truncated": rollout.is_truncated,
        "decoding": {
            "strategy": "greedy" if call.temperature == 0 else "sample",
            "temperature": call.temperature,
            "top_k": call.top_k if call.top_k > 0 else None,
            "top_p": call.top_p if call.top_p < 1 else None,
            "min_p": call.min_p or None,
            "repetition_penalty": call.repetition_penalty if call.repetition_penalty != 1 else None,
            "presence_penalty": None,
            "frequency_penalty": None,
            "max_output_tokens": max_output_tokens,
            "min_output_tokens": None,
            "stop_strings": None,
            "stop_token_ids": None,
            "ignore_eos": False,
            "seed": call.seed,
        },
        "metadata": {"timestamp": float(call.created), "weight_step": call.policy_version},
    }


def to_marin_batch(
    batch: TrainingBatch, *, max_output_tokens: int, allow: Collection[str] = ()
) -> dict[str, Any]:
    """Convert a TrainingBatch to Marin's: arrays [B, T], and temperature, top_k, truncated [B]; unshifted.

    `loss_weights` is the mask times the advantage. Raises ConversionError.
    """
    for weighted in batch.rollouts:
        check_weights_carried(weighted, "Marin's TrainingBatch", BATCH_CARRIES, allow)
    last = [weighted.rollout.segments[-1].call for weighted in batch.rollouts]
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "loss_weights": batch.loss_weights,
        "loss_masks": batch.loss_masks.astype(np.int32),
        "policy_logprobs": batch.policy_logprobs,
        "temperature": np.array([call.temperature for call in last], dtype=np.float32),
        "top_k": np.array([call.top_k for call in last], dtype=np.int32),
        "truncated": np.array([call.stop_reason == "length" for call in last]),
        "max_output_tokens": max_output_tokens,
    }
