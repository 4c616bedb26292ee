"""`TrainingBatch`: rollouts as padded arrays, for a trainer that takes rectangles.

Invariant: nothing is cut and nothing is shifted. Position t of a row is token t of its sequence, and what is
padding or was not sampled has mask 0 and weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.types import BoolArray, WeightedRollout

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences, right-padded to T positions."""

    input_ids: IntArray
    """int32 [B, T]: `pad_token_id` after a sequence's end."""

    position_ids: IntArray
    """int32 [B, T]: 0, 1, ... of each row, 0 in the padding."""

    attention_mask: BoolArray
    """bool [B, T]: False in the padding."""

    loss_masks: BoolArray
    """bool [B, T]: True where the policy sampled the token."""

    loss_weights: FloatArray
    """float32 [B, T]: mask times advantage."""

    policy_logprobs: FloatArray
    """float32 [B, T]: the sampler's log probability; 0 where the mask is False."""

    lengths: npt.NDArray[np.int32]
    """int32 [B]: tokens of each sequence."""

    rollouts: tuple[WeightedRollout, ...]
    """What the rows were made of: [B]."""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(
        cls,
        rollouts: Sequence[WeightedRollout],
        *,
        pad_token_id: int = 0,
        length: int | None = None,
        multiple_of: int = 1,
    ) -> TrainingBatch:
        """Pad to `length`, or to the longest sequence rounded up to a multiple of `multiple_of`.

        Raises ValueError for no rollouts, or one longer than `length`: cutting it would leave sampled tokens
        out of the loss unseen.
        """
        if not rollouts:
            raise ValueError("a training batch needs at least one rollout")
        lengths = np.array([len(item.rollout.tokens) for item in rollouts], dtype=np.int32)
        longest = int(lengths.max())
        width = -(-longest // multiple_of) * multiple_of if length is None else length
        if longest > width:
            uuid = rollouts[int(lengths.argmax())].rollout.episode_uuid
            raise ValueError(
                f"the sequence of episode {uuid} has {longest} tokens, more than length={length}: give it "
                "room or leave it out"
            )
        present = np.arange(width) < lengths[:, None]
        return cls(
            input_ids=_padded([item.rollout.tokens for item in rollouts], width, pad_token_id),
            position_ids=np.where(present, np.arange(width), 0).astype(np.int32),
            attention_mask=present,
            loss_masks=_padded([item.rollout.sampled for item in rollouts], width),
            loss_weights=_padded([item.advantages for item in rollouts], width),
            policy_logprobs=_padded([item.rollout.logprobs for item in rollouts], width),
            lengths=lengths,
            rollouts=tuple(rollouts),
        )


def _padded(rows: Sequence[npt.NDArray[Scalar]], width: int, fill: int = 0) -> npt.NDArray[Scalar]:
    out = np.full((len(rows), width), fill, dtype=rows[0].dtype)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out
