"""What a training step computed for each sampled token: `TrainedSequence`, as the ledger has it.

Invariant: arrays are little-endian bytes, one element for each sampled token of a sequence, in order, so that
they line up with `Rollout.sampled`. Training reads none of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from tinkerscript.ledger.compression import packed, unpacked


class TokenUse(IntEnum):
    """What a training step did with a sampled token."""

    TRAINED = 0
    CONSTRAINED = 1
    """It carries no loss: a grammar constrained its choice (`training.constrained_tokens`)."""

    CORRECTED = 2
    """It carries no loss: sampler and trainer differ too much (`training.rollout_correction`), or the policy
    is too certain of it (`training.top_entropy`)."""

    LEFT_OUT = 3
    """Its sequence did not train; `TrainedSequence.reason` says why."""


class TrainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did with one sequence of S sampled tokens; arrays may be empty: not recorded."""

    number: int
    """Of the sequence within its episode and role, from 0, as `merge_calls` orders them."""

    role: str = ""
    """Whose policy sampled it: that of a role that trains; empty: the run's own."""

    trainer_logprobs: bytes = b""
    """float32 [S]: the trainer's, before the step's first update."""

    entropies: bytes = b""
    """float16 [S]: of the trainer's distribution at each token, in nats."""

    advantages: bytes = b""
    """float32 [S], or [1] if they are all equal: what the loss was given, before it was averaged."""

    uses: bytes = b""
    """uint8 [S], or [1] if they are all equal: `TokenUse`."""

    reason: str = ""
    """Why the sequence did not train; empty if it did."""

    chat: bytes = b""
    """int32 [T]: the tokens of a chat of supervised fine-tuning, which has no calls."""

    chat_trained: bytes = b""
    """uint8 [T]: 1 at the tokens of the chat that train; S of them."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrainedSequence]).decode


def packed_sequences(sequences: Sequence[TrainedSequence]) -> bytes:
    """The bytes of `TokensRow.sequences`."""
    return packed(_encode(sequences))


def unpacked_sequences(data: bytes) -> list[TrainedSequence]:
    """What `packed_sequences` packed. Raises ValueError for anything else: a ledger may be from elsewhere."""
    try:
        return _decode(unpacked(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the tokens of an episode: {error}") from error
