"""Rollouts as Tinker `Datum`s: shifted by one, so that position t predicts token t + 1."""

from __future__ import annotations

import numpy as np
import tinker

from tinkerscript.rollouts.types import Rollout


def to_datum(rollout: Rollout, advantage: float) -> tinker.Datum:
    """A rollout of T tokens as a Datum of T - 1 positions for Tinker's policy-gradient losses.

    Worked example, prompt `p q`, response `r s`, advantage 0.5:
        model_input     p    q    r
        target_tokens   q    r    s
        logprobs        0    l_r  l_s
        advantages      0    0.5  0.5
    Only sampled tokens have an advantage, so only they train.
    """
    advantages = np.where(rollout.sampled, np.float32(advantage), np.float32(0))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(rollout.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(rollout.tokens[1:].astype(np.int64)),
            "logprobs": tinker.TensorData.from_numpy(rollout.logprobs[1:].copy()),
            "advantages": tinker.TensorData.from_numpy(advantages[1:].copy()),
        },
    )
