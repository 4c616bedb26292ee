"""Groups that a run sampled, and what its weights gave their tokens in three steps: `recorded_batch`.

`recorded_batch.npz` has the episodes that trained in steps 1, 2 and 3 of a run of the demo, from its ledger:

    tinkerscript train examples/arithmetic.yaml --set experiment_dir=RUN --set training.steps=4 \\
        --set training.replay_uses=3 --set training.learning_rate=6e-4 --set training.groups_per_step=8
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import FloatArray

FILE = Path(__file__).with_suffix(".npz")
PROMPT = 3
"""Tokens before each reply in `RecordedBatch.groups`."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RecordedBatch:
    """E episodes of one reply each, padded to R tokens. Arrays are float64 [E, R], 0 in the padding."""

    rewards: Array
    """float64 [E]"""

    group: npt.NDArray[np.int64]
    """[E]: the number of each episode's group."""

    lengths: npt.NDArray[np.int64]
    """[E]: tokens of the reply."""

    sampler: Array
    """Log probabilities of the sampler, whose weights were those before step 1."""

    old: Array
    """Of the trainer before step 2."""

    new: Array
    """Of the trainer before step 3."""

    entropies: Array
    """Of the trainer's distributions before step 1, in nats."""

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool [E, R]"""
        return np.arange(self.sampler.shape[1]) < self.lengths[:, None]

    def groups(self) -> list[RolloutGroup]:
        """The groups, with a short prompt before each reply."""
        made: dict[int, list[int]] = {}
        for at, number in enumerate(self.group.tolist()):
            made.setdefault(number, []).append(at)
        return [
            make_group([self._episode(at) for at in members], f"g{number}")
            for number, members in made.items()
        ]

    def _episode(self, at: int):
        logprobs = self.sampler[at, : self.lengths[at]].tolist()
        call = make_call(None, [5] * PROMPT, [9] * len(logprobs), logprobs=logprobs)
        return make_episode([call], float(self.rewards[at]), f"e{at}")

    def of_sequences(self, values: Array) -> list[FloatArray]:
        """`values` as the trainer has them: float32 [T] for each sequence of `groups`."""
        prompt = np.zeros(PROMPT)
        return [
            np.append(prompt, row[:length]).astype(np.float32)
            for row, length in zip(values, self.lengths, strict=True)
        ]

    def of_replies(self, sequences: list[FloatArray]) -> Array:
        """The reverse of `of_sequences`."""
        found = np.zeros(self.sampler.shape)
        for row, values in zip(found, sequences, strict=True):
            row[: len(values) - PROMPT] = values[PROMPT:]
        return found


def recorded_batch() -> RecordedBatch:
    with np.load(FILE) as arrays:
        whole = {name: arrays[name] for name in arrays.files}
    floats = {name: each.astype(np.float64) for name, each in whole.items() if each.dtype == np.float32}
    return RecordedBatch(**{**whole, **floats})
