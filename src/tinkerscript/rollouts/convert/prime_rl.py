"""prime-rl's training samples (github.com/PrimeIntellect-ai/prime-rl, `transport/types.py`).

A sample has one scalar advantage. There are two layouts: the older one separates prompt and completion, the
newer one is flat and has a temperature per token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.convert.traits import check_weights_carried
from tinkerscript.rollouts.rollout import Rollout

CARRIES = frozenset({"several_calls", "several_sequences"})
FLAT_CARRIES = CARRIES | {"temperature", "mixed_sampling"}


def to_prime_rl(
    weighted: WeightedRollout, *, layout: Literal["parts", "flat"] = "parts", allow: Collection[str] = ()
) -> dict[str, Any]:
    """Convert one sequence to a sample.

    `parts`: prompt_ids, prompt_mask [P], completion_ids, completion_mask, completion_logprobs [R], advantage.
    `flat`: token_ids, mask, logprobs, temperatures [T], env_name, advantage, reward. Raises ConversionError,
    also for allowed `token_advantages`, which cannot become one number.
    """
    carried = FLAT_CARRIES if layout == "flat" else CARRIES
    check_weights_carried(weighted, "prime-rl's sample", carried, allow)
    rollout, advantage = weighted.rollout, weighted.scalar
    if advantage is None:
        raise ConversionError(
            f"prime-rl's sample has one advantage; the tokens of episode {rollout.episode_uuid} differ"
        )
    if layout == "flat":
        reward = rollout.episode_reward
        return {
            "token_ids": rollout.tokens.tolist(),
            "mask": rollout.sampled.tolist(),
            "logprobs": rollout.logprobs.tolist(),
            "temperatures": _temperatures(rollout),
            "env_name": rollout.env_name,
            "advantage": advantage,
            "reward": None if np.isnan(reward) else reward,
        }
    return {
        "prompt_ids": rollout.prompt_tokens.tolist(),
        "prompt_mask": [False] * rollout.prompt_length,
        "completion_ids": rollout.response_tokens.tolist(),
        "completion_mask": rollout.response_mask.tolist(),
        "completion_logprobs": rollout.response_logprobs.tolist(),
        "advantage": advantage,
    }


def _temperatures(rollout: Rollout) -> list[float]:
    """Each token's sampling temperature; 1 if it was not sampled."""
    temperatures = np.ones(len(rollout.tokens))
    for segment in rollout.segments:
        temperatures[segment.start : segment.end] = segment.call.temperature
    return temperatures.tolist()
