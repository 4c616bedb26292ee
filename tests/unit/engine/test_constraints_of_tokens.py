"""What a grammar did to each token, as the sampler knows it."""

from __future__ import annotations

import math

import numpy as np
import torch

from tinkerscript.engine.sampling import RowSettings, choose
from tinkerscript.rollouts.call import TokenConstraint

NONE, CUT, FORCED = TokenConstraint.NONE, TokenConstraint.CUT, TokenConstraint.FORCED


def settings(rows: int, temperature: float = 1.0, top_k: int = -1) -> RowSettings:
    return RowSettings(
        torch.full((rows,), temperature),
        torch.ones(rows),
        torch.full((rows,), top_k),
        torch.zeros(rows),
        plain=temperature == 1 and top_k <= 0,
        truncated=top_k > 0,
    )


LOGITS = [
    [0.0, 1.0, 2.0, -math.inf],  # the fourth id has no probability
    [0.0, 1.0, 2.0, -math.inf],
    [0.0, 1.0, 2.0, -math.inf],
    [0.0, 1.0, 2.0, -200.0],  # e^-202 is 0 in float32
    [0.0, 1.0, 2.0, -10.0],
    [50.0, 0.0, 0.0, 0.0],
]
ALLOWED = [
    [True, True, True, True],
    [True, True, True, False],
    [False, True, False, False],
    [True, True, True, False],
    [True, True, True, False],
    [True, False, False, False],
]
EXPECTED = [NONE, NONE, FORCED, NONE, CUT, FORCED]


def test_a_choice_is_free_cut_or_forced() -> None:
    logits, allowed = torch.tensor(LOGITS), torch.tensor(ALLOWED)
    for temperature, top_k in ((1.0, -1), (1.0, 1), (0.0, -1)):
        chosen = choose(logits, torch.full((6,), 0.5), settings(6, temperature, top_k), allowed)
        assert chosen.constraints is not None
        assert chosen.constraints.tolist() == EXPECTED
        # The logprobs are those of the distribution before the grammar.
        free = torch.log_softmax(logits, -1).gather(-1, chosen.ids[:, None])[:, 0]
        np.testing.assert_allclose(chosen.logprobs, free, rtol=1e-6)


def test_a_hot_distribution_has_more_to_cut() -> None:
    """Probabilities are those after temperature."""
    logits, allowed = torch.tensor([LOGITS[3]]), torch.tensor([ALLOWED[3]])
    chosen = choose(logits, torch.tensor([0.5]), settings(1, 10.0), allowed)
    assert chosen.constraints is not None
    assert chosen.constraints.tolist() == [CUT]
