"""Tinker's `Datum`: shifted by one, so that position t predicts token t + 1."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import tinker

from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.convert.traits import check_weights_carried
from tinkerscript.rollouts.rollout import Rollout

CARRIES = frozenset({"constrained", "several_calls", "several_sequences", "token_advantages"})


def to_datum(weighted: WeightedRollout, *, allow: Collection[str] = ()) -> tinker.Datum:
    """Convert a rollout of T tokens to a Datum of T - 1 positions for Tinker's policy-gradient losses.

    Worked example, prompt `p q`, response `r s`, advantage 0.5:
        model_input     p    q    r
        target_tokens   q    r    s
        logprobs        0    l_r  l_s
        advantages      0    0.5  0.5
    Only sampled tokens have an advantage, so only they train. Raises ConversionError for what a Datum cannot
    hold, such as a temperature: Tinker's losses compare with logprobs at temperature 1.
    """
    check_weights_carried(weighted, "a Tinker Datum", CARRIES, allow)
    return to_training_datum(weighted)


def to_training_datum(weighted: WeightedRollout) -> tinker.Datum:
    """`to_datum` for a rollout that the alignment check has passed: what a Datum cannot hold is left out."""
    rollout = weighted.rollout
    reference = rollout.logprobs if weighted.reference is None else weighted.reference
    return _datum(
        rollout,
        logprobs=tinker.TensorData.from_numpy(reference[1:].copy()),
        advantages=tinker.TensorData.from_numpy(weighted.advantages[1:].copy()),
    )


def to_scoring_datum(rollout: Rollout) -> tinker.Datum:
    """Convert a rollout to a Datum for `cross_entropy`, with weight 1 on the tokens with loss.

    Used to get logprobs from `forward`, and for supervised training on what was sampled.
    """
    return _datum(rollout, weights=tinker.TensorData.from_numpy(rollout.loss_mask[1:].astype(np.float32)))


def to_distillation_datum(rollout: Rollout, teacher: FloatArray, weight: float) -> tinker.Datum:
    """Convert a rollout to a Datum for `reverse_kl`, with `weight` on the tokens with loss.

    `teacher`: float32 [T], the teacher's log probabilities.
    """
    return _datum(
        rollout,
        logprobs=tinker.TensorData.from_numpy(rollout.logprobs[1:].copy()),
        teacher_logprobs=tinker.TensorData.from_numpy(teacher[1:].copy()),
        weights=tinker.TensorData.from_numpy((rollout.loss_mask[1:] * np.float32(weight)).astype(np.float32)),
    )


def _datum(rollout: Rollout, **inputs: tinker.TensorData) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(rollout.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(rollout.tokens[1:].astype(np.int64)),
            **inputs,
        },
    )
