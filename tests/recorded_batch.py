"""Groups that a run sampled, and what its weights gave their tokens in three steps: `recorded_batch`.

`recorded_batch.npz` is from the ledger of a run of the demo whose groups trained in three steps each:

    tinkerscript train examples/arithmetic.yaml --set experiment_dir=RUN --set training.steps=4 \\
        --set training.replay_uses=3 --set training.learning_rate=6e-4 --set training.groups_per_step=8
    PYTHONPATH=tests python tests/recorded_batch.py RUN
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollout_helpers import make_call, make_episode, make_group
from run_ledger import dictionaries
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.ledger.tokens import unpacked_sequences
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


def record(folder: Path) -> None:
    """Write the episodes that trained in steps 1, 2 and 3."""
    with closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        trained = {
            uuid: [unpacked_sequences(each, dictionaries(folder))[0] for each in sequences]
            for uuid, *sequences in ledger.execute(
                "SELECT uuid, a.sequences, b.sequences, c.sequences FROM episodes e "
                "JOIN tokens a ON a.episode = e.sequence AND a.step = 1 "
                "JOIN tokens b ON b.episode = e.sequence AND b.step = 2 "
                "JOIN tokens c ON c.episode = e.sequence AND c.step = 3"
            )
        }
    episodes = [
        (number, episode)
        for number, group in enumerate(recorded_groups(folder))
        for episode in group.episodes
        if episode.episode_uuid in trained
    ]
    lengths = np.array([int(episode.rollouts[0].sampled.sum()) for _, episode in episodes])
    shape = len(episodes), int(lengths.max())
    found = {name: np.zeros(shape, np.float32) for name in ("sampler", "old", "new", "entropies")}
    for at, (_, episode) in enumerate(episodes):
        first, second, third = trained[episode.episode_uuid]
        (rollout,) = episode.rollouts
        rows = {
            "sampler": rollout.logprobs[rollout.sampled],
            "old": np.frombuffer(second.trainer_logprobs, "<f4"),
            "new": np.frombuffer(third.trainer_logprobs, "<f4"),
            "entropies": np.frombuffer(first.entropies, "<f2"),
        }
        for name, row in rows.items():
            found[name][at, : lengths[at]] = row
    rewards = np.array([episode.reward for _, episode in episodes], np.float32)
    numbers = np.array([number for number, _ in episodes])
    np.savez_compressed(FILE, rewards=rewards, group=numbers, lengths=lengths, **found)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
