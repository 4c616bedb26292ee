"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) on pairs of episodes.

A pair's loss depends on all its tokens, but an engine's losses are sums over tokens. So each step computes
log probabilities, then trains with `cross_entropy` weighted by the loss's derivatives: the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from tinkerscript.rollouts.advantages import Doubles
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.train.backends.backend import TrainingClient
from tinkerscript.train.chats import Datums, SupervisedExample, trained_weight, weighted
from tinkerscript.train.token_advantages import ReferenceLogprobs


@dataclass(frozen=True, slots=True)
class PairLosses:
    """For P pairs, float64 [P] each."""

    losses: Doubles
    """-log sigmoid(margin), in nats."""

    margins: Doubles
    """Implicit rewards: beta times how much further the policy has moved toward the better episode."""

    slopes: Doubles
    """Derivative of the mean loss by the better episode's logprob; the worse one's is its negative."""

    @classmethod
    def of(cls, better: Doubles, worse: Doubles, beta: float) -> PairLosses:
        """`better`, `worse`: log p(policy) - log p(start), float64 [P]."""
        margins = beta * (better - worse)
        losses = np.logaddexp(0.0, -margins)
        return cls(losses, margins, -beta * np.exp(-margins - losses) / len(margins))

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "loss": float(self.losses.mean()),
            "margin": float(self.margins.mean()),
            "accuracy": float((self.margins > 0).mean()),
        }


class Dpo:
    def __init__(self, start: ReferenceLogprobs, beta: float) -> None:
        self._start, self._beta = start, beta

    async def losses(
        self, pairs: Sequence[SupervisedExample], client: TrainingClient
    ) -> tuple[PairLosses, dict[str, float]]:
        """The metrics' `nll` is of the better episodes' tokens."""
        datums = [datum for pair in pairs for datum in pair.datums]
        output = await client.forward(datums, "cross_entropy")
        tokens = [_tokens(datum) for datum in datums]
        start = await self._start(tokens, [np.ones(len(each), np.float32) for each in tokens])
        rows = zip(datums, output.loss_fn_outputs, start, strict=True)
        sums = iter([_sums(datum, row["logprobs"].to_numpy(), of_start[1:]) for datum, row, of_start in rows])
        better, worse = np.zeros((len(pairs), 2)), np.zeros((len(pairs), 2))
        for place, pair in enumerate(pairs):
            for side, sequences in ((better, pair.sequences), (worse, pair.rejected)):
                for _ in sequences:
                    side[place] += next(sums)
        found = PairLosses.of(better[:, 0] - better[:, 1], worse[:, 0] - worse[:, 1], self._beta)
        number = sum(trained_weight(datum) for pair in pairs for datum in pair.sequences)
        return found, found.metrics | {"nll": -float(better[:, 0].sum()) / number}

    async def weighted(
        self, pairs: Sequence[SupervisedExample], client: TrainingClient
    ) -> tuple[Datums, dict[str, float]]:
        found, metrics = await self.losses(pairs, client)
        datums: Datums = []
        for pair, slope in zip(pairs, found.slopes.tolist(), strict=True):
            datums += [weighted(datum, -slope) for datum in pair.sequences]
            datums += [weighted(datum, slope) for datum in pair.rejected]
        return datums, metrics


def _tokens(datum: tinker.Datum) -> IntArray:
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    return np.concatenate([datum.model_input.to_ints()[:1], targets]).astype(np.int32)


def _sums(datum: tinker.Datum, policy: FloatArray, start: FloatArray) -> Doubles:
    """float64 [2]: log p(policy) and log p(start) of the trained tokens."""
    weights = datum.loss_fn_inputs["weights"].to_numpy().astype(np.float64)
    return np.array([policy @ weights, start @ weights])
