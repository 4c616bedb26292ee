"""`TrainedSequence`: what a training step computed for each sampled token, for people to read.

Invariant: arrays are little-endian and have one element per sampled token of the sequence, so they line up
with `Rollout.sampled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from tinkerscript.ledger.compression import packed, unpacked


class TokenUse(IntEnum):
    TRAINED = 0
    CONSTRAINED = 1
    """No loss: a grammar constrained its choice (`training.constrained_tokens`)."""

    CORRECTED = 2
    """No loss: sampler and trainer differ too much (`training.rollout_correction`), or the policy is too
    certain of it (`training.top_entropy`)."""

    LEFT_OUT = 3
    """Its sequence did not train; see `TrainedSequence.reason`."""


class TrainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did with a sequence of S sampled tokens. Empty arrays were not recorded."""

    number: int
    """Index within the episode and role, in the order of `merge_calls`."""

    role: str = ""
    """Trained role that sampled the sequence. Empty: the main policy."""

    trainer_logprobs: bytes = b""
    """float32 [S]: the trainer's, before the step's first update."""

    entropies: bytes = b""
    """float16 [S]: entropy of the trainer's distribution at each token, in nats."""

    advantages: bytes = b""
    """float32 [S], or [1] if all are equal: input of the loss, before averaging."""

    uses: bytes = b""
    """uint8 [S], or [1] if all are equal: `TokenUse`."""

    reason: str = ""
    """Why the sequence did not train; empty if it did."""

    chat: bytes = b""
    """int32 [T]: tokens of a chat of supervised training, which has no calls."""

    chat_trained: bytes = b""
    """uint8 [T]: 1 at each of the S tokens of the chat that train."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrainedSequence]).decode


def packed_sequences(sequences: Sequence[TrainedSequence]) -> bytes:
    return packed(_encode(sequences))


def unpacked_sequences(data: bytes) -> list[TrainedSequence]:
    """Undo `packed_sequences`. Raises ValueError for any other bytes, which a stranger's ledger may hold."""
    try:
        return _decode(unpacked(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the tokens of an episode: {error}") from error
