"""`TrainedSequence`: a step's numbers for each sampled token, for people to read.

Arrays are little-endian, in the order of `Rollout.sampled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from tinkerscript.ledger.compression import NO_DICTIONARIES, Dictionaries, packed, unpacked


class TokenUse(IntEnum):
    TRAINED = 0
    CONSTRAINED = 1
    """No loss, because a grammar constrained it (`training.constrained_tokens`)."""

    CORRECTED = 2
    """No loss: sampler and trainer differ too much (`training.rollout_correction`), or entropy is low
    (`training.top_entropy`)."""

    LEFT_OUT = 3


class TrainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of S sampled tokens. Empty arrays were not recorded."""

    number: int
    role: str = ""
    trainer_logprobs: bytes = b""
    """float32 [S], before the step's first update."""

    entropies: bytes = b""
    """float16 [S]: entropy of the trainer's distribution, in nats."""

    advantages: bytes = b""
    """float32 [S], or [1] if all are equal: input of the loss, before averaging."""

    uses: bytes = b""
    """uint8 [S], or [1] if all are equal: `TokenUse`."""

    reason: str = ""
    chat: bytes = b""
    """int32 [T]: tokens of a supervised chat, which has no calls."""

    chat_trained: bytes = b""
    """uint8 [T]: 1 at each of the S tokens that train."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrainedSequence]).decode


def packed_sequences(sequences: Sequence[TrainedSequence]) -> bytes:
    return packed(_encode(sequences))


def unpacked_sequences(data: bytes, dictionaries: Dictionaries = NO_DICTIONARIES) -> list[TrainedSequence]:
    try:
        return _decode(unpacked(data, dictionaries))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the tokens of an episode: {error}") from error
