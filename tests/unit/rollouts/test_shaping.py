"""Token-level rewards by position: shares that sum to the episode's reward, on sampled tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinkerscript.inference_ctx import InferenceContext, InferenceTurn
from tinkerscript.rollouts.advantages import at_end, by_call, discounted, evenly
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.rollout import Rollout


def turn(prompt: list[int], ids: list[int]) -> InferenceTurn:
    logprobs = {"content": [{"token": "?", "logprob": -0.5} for _ in ids]}
    return InferenceTurn(prompt, {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"})


TURNS = [turn([1, 2], [10, 11]), turn([1, 2, 10, 11, 3], [12])]
"""[1 2] 10 11 [3] 12"""


def shaped(reward: Callable[[Rollout], FloatArray]) -> Rollout:
    context = InferenceContext(tokenizer=None)
    (rollout,) = context.create_rollouts_from_turns(TURNS, "e", "x", reward)
    return rollout


@pytest.mark.parametrize(
    ("reward", "shares"),
    [
        (lambda rollout: at_end(rollout, 6), [0, 0, 0, 6]),
        (lambda rollout: evenly(rollout, 6), [2, 2, 0, 2]),
        (lambda rollout: discounted(rollout, 7, 0.5), [1, 2, 0, 4]),
        (lambda rollout: by_call(rollout, [2, 4]), [0, 2, 0, 4]),
    ],
)
def test_shares_fall_on_sampled_tokens_and_sum_to_the_reward(reward: Any, shares: list[float]) -> None:
    rollout = shaped(reward)
    np.testing.assert_allclose(rollout.token_rewards, shares, rtol=1e-6)
    assert rollout.token_rewards.dtype == np.float32
    assert rollout.episode_reward == pytest.approx(sum(shares))


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="1 rewards for 2 calls"):
        shaped(lambda rollout: by_call(rollout, [1.0]))
    for discount in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            shaped(lambda rollout, discount=discount: discounted(rollout, 1.0, discount))
