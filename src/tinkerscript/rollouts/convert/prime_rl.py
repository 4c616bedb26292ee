"""prime-rl's `TrainingSample` (github.com/PrimeIntellect-ai/prime-rl, `prime_rl/transport/types.py`).

Its definition has changed; each layout has every field that one of them requires, and no other.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.convert.traits import check_weights_carried
from tinkerscript.rollouts.rollout import Rollout

CARRIES = frozenset({"constrained", "several_calls", "several_sequences", "temperature", "mixed_sampling"})
FLAT_CARRIES = CARRIES | {"token_advantages"}

Layout = Literal["parts", "flat", "channels"]


def to_prime_rl(
    weighted: WeightedRollout, *, layout: Layout = "flat", allow: Collection[str] = ()
) -> dict[str, Any]:
    """Convert one sequence to a sample.

    `parts`: prompt_ids, prompt_mask [P]; completion_ids, completion_mask, completion_logprobs,
    completion_temperatures [R]; one advantage. `flat`: token_ids, mask, logprobs, temperatures, advantages
    [T]. `channels`: like `flat`, with the advantages as those of the loss `rl`. All have env_name, and reward
    (None if the rollout has none). Raises ConversionError, also for allowed `token_advantages` that cannot
    become one number.
    """
    carried = CARRIES if layout == "parts" else FLAT_CARRIES
    check_weights_carried(weighted, "prime-rl's sample", carried, allow)
    rollout = weighted.rollout
    reward = None if np.isnan(rollout.episode_reward) else rollout.episode_reward
    shared = {"env_name": rollout.env_name, "reward": reward}
    if layout == "parts":
        return _parts(weighted) | shared
    values, mask = weighted.advantages.tolist(), rollout.loss_mask.tolist()
    channels = [{"loss": "rl", "values": values, "mask": mask}]
    return {
        "token_ids": rollout.tokens.tolist(),
        "mask": mask,
        "logprobs": rollout.logprobs.tolist(),
        "temperatures": _temperatures(rollout),
        "advantages": channels if layout == "channels" else values,
        **shared,
    }


def _parts(weighted: WeightedRollout) -> dict[str, Any]:
    rollout, advantage = weighted.rollout, weighted.scalar
    if advantage is None:
        raise ConversionError(
            f"prime-rl's sample has one advantage; the tokens of episode {rollout.episode_uuid} differ"
        )
    return {
        "prompt_ids": rollout.prompt_tokens.tolist(),
        "prompt_mask": [False] * rollout.prompt_length,
        "completion_ids": rollout.response_tokens.tolist(),
        "completion_mask": rollout.response_loss_mask.tolist(),
        "completion_logprobs": rollout.response_logprobs.tolist(),
        "completion_temperatures": _temperatures(rollout)[rollout.prompt_length :],
        "advantage": advantage,
    }


def _temperatures(rollout: Rollout) -> list[float]:
    """Each token's sampling temperature; 1 if it was not sampled."""
    temperatures = np.ones(len(rollout.tokens))
    for segment in rollout.segments:
        temperatures[segment.start : segment.end] = segment.call.temperature
    return temperatures.tolist()
