"""What is recorded: episodes with the calls of every attempt, and each token's part in training.

Invariant: nothing here is read back by training. Arrays are little-endian bytes, one element for each sampled
token of a sequence, in order, so that they line up with `Rollout.sampled`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from typing import Any, TypeVar

import msgspec
import zstandard

from tinkerscript.rollouts.call import Call

T = TypeVar("T")

LEVEL = 1
"""Of zstd: logprobs barely compress at any level."""


class TokenUse(IntEnum):
    """What a training step did with a sampled token."""

    TRAINED = 0
    CONSTRAINED = 1
    """It carries no loss: a grammar constrained its choice (`training.constrained_tokens`)."""

    CORRECTED = 2
    """It carries no loss: sampler and trainer differ too much (`training.rollout_correction`)."""

    LEFT_OUT = 3
    """Its sequence did not train; `TrainedSequence.reason` says why."""


class EpisodeDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode leaves besides its row."""

    calls: list[Call] = []
    """Of the attempt that counts, and of every role."""

    failed_calls: dict[int, list[Call]] = {}
    """Attempt -> the calls of one that failed. They never train."""

    failures: list[dict[str, Any]] = []
    """One for each failed attempt."""

    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    chat: bytes = b""
    """int32 [T]: the tokens of a chat of supervised fine-tuning, which has no calls."""

    chat_trained: bytes = b""
    """uint8 [T]: 1 at the tokens of the chat that train."""

    def size(self) -> int:
        """About how many bytes of memory it takes."""
        attempts = [self.calls, *self.failed_calls.values()]
        return 5 * len(self.chat) // 4 + sum(map(_size, chain.from_iterable(attempts)))


class RecordedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that ended."""

    uuid: str
    episode_type: str
    step: int
    """The training step that it is for, or that an evaluation follows; 0: before the first, or unknown."""

    label: str = ""
    """Of an evaluation: `before`, `step-5`, `after`; empty for training."""

    group_id: str
    task: str = ""
    sample: dict[str, Any] | None = None
    """The Inspect sample as JSON; None for a client's own."""

    status: str
    """`accepted`, `failed` or `cancelled`."""

    reward: float | None = None
    is_success: bool | None = None
    attempt: int = 0
    """The one that counts; of a failed episode, the last."""

    client_uuid: str = ""
    ended: float
    """Unix time in seconds."""

    detail: EpisodeDetail


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

    def size(self) -> int:
        """About how many bytes of memory it takes."""
        return len(self.trainer_logprobs) + len(self.entropies) + len(self.advantages) + len(self.uses)


class TrainedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did with one episode."""

    uuid: str
    outcome: str
    """`trained`, or why not: `same_reward`, `group_too_small`, `stale`, `misaligned`, `stopped` (the step, by
    misalignment), `nothing_to_train`."""

    advantage: float | None = None
    sequences: list[TrainedSequence] = []


def _size(call: Call) -> int:
    arrays = len(call.new_prompt) + len(call.sampled) + len(call.logprobs)
    return arrays + len(call.messages) + len(call.reply) + len(call.tools)


_pack = msgspec.msgpack.Encoder().encode


def packed(value: object) -> bytes:
    """`value`, made of these, as compressed msgpack."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(_pack(value))


def unpacked(data: bytes, kind: type[T]) -> T:
    """What `packed` packed."""
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data), type=kind)
