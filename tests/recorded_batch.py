"""Groups that a run sampled, and what its weights gave their tokens in two steps: `recorded_batch`.

`recorded_batch.npz` is from the ledger of a run of the demo whose groups trained twice:

    tinkerscript train examples/arithmetic.yaml --set experiment_dir=RUN --set training.replay_uses=2 \\
        --set training.max_policy_lag=1 --set training.learning_rate=2e-3 --set training.groups_per_step=8
    python tests/recorded_batch.py RUN STEP
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.ledger.tokens import unpacked_sequences
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import FloatArray

FILE = Path(__file__).with_suffix(".npz")


@dataclass(frozen=True)
class RecordedBatch:
    """E episodes of one sequence each, padded to R sampled tokens. Arrays float32 [E, R], 0 in the padding."""

    rewards: FloatArray
    """float32 [E]"""

    group: np.ndarray
    """int [E]: the number of each episode's group; episodes of a group follow one another."""

    lengths: np.ndarray
    """int [E]: sampled tokens."""

    sampler: FloatArray
    """Log probabilities of the sampler."""

    old: FloatArray
    """Of the trainer before the first step that trained on them."""

    new: FloatArray
    """Of the trainer before the second, one step later."""

    entropies: FloatArray
    """Of the trainer's distributions before the first step, in nats."""

    @property
    def mask(self) -> np.ndarray:
        """bool [E, R]"""
        return np.arange(self.sampler.shape[1]) < self.lengths[:, None]

    def groups(self) -> list[RolloutGroup]:
        """The groups, with a prompt of three tokens before each reply."""
        groups = list[RolloutGroup]()
        for number in np.unique(self.group):
            episodes = [
                make_episode(
                    [make_call(None, [5, 6, 7], [9] * length, logprobs=self.sampler[at, :length].tolist())],
                    float(self.rewards[at]),
                    f"e{at}",
                )
                for at in np.flatnonzero(self.group == number)
                for length in [int(self.lengths[at])]
            ]
            groups.append(make_group(episodes, f"g{number}"))
        return groups

    def of_tokens(self, values: FloatArray) -> list[FloatArray]:
        """`values` [E, R] as the trainer has them: float32 [T] for each sequence."""
        zeros = np.zeros(3, np.float32)
        return [np.append(zeros, row[:length]) for row, length in zip(values, self.lengths, strict=True)]


def recorded_batch() -> RecordedBatch:
    with np.load(FILE) as arrays:
        return RecordedBatch(**arrays)


def record(folder: Path, step: int) -> None:
    """Write the episodes that trained in `step` for the first time and in the next one again."""
    with closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        rows = ledger.execute(
            "SELECT e.group_id, json_extract(r.result, '$.reward'), c.logprobs, first.sequences, again.sequences "
            "FROM tokens first JOIN tokens again ON again.episode = first.episode AND again.step = ?1 + 1 "
            "JOIN episodes e ON e.number = first.episode JOIN results r ON r.episode = e.number "
            "JOIN calls c ON c.episode = e.number WHERE first.step = ?1 ORDER BY e.group_id, e.number",
            (step,),
        ).fetchall()
    names = sorted({row[0] for row in rows})
    lengths = np.array([len(row[2]) // 4 for row in rows])
    arrays = {name: np.zeros((len(rows), lengths.max()), np.float32) for name in ("sampler", "old", "new", "entropies")}
    for at, (_, _, logprobs, first, again) in enumerate(rows):
        (was,), (now,) = unpacked_sequences(first), unpacked_sequences(again)
        found = {
            "sampler": np.frombuffer(logprobs, "<f4"),
            "old": np.frombuffer(was.trainer_logprobs, "<f4"),
            "new": np.frombuffer(now.trainer_logprobs, "<f4"),
            "entropies": np.frombuffer(was.entropies, "<f2"),
        }
        for name, values in found.items():
            arrays[name][at, : lengths[at]] = values
    rewards = np.array([row[1] for row in rows], np.float32)
    np.savez_compressed(FILE, rewards=rewards, group=np.array([names.index(row[0]) for row in rows]), lengths=lengths, **arrays)


if __name__ == "__main__":
    record(Path(sys.argv[1]), int(sys.argv[2]))
