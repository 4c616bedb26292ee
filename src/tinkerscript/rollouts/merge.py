"""Merging calls into training sequences by exact token prefix.

A call joins the open sequence that its prompt starts with, whole; otherwise it opens a new one. So every
sampled token is in exactly one sequence, after exactly the prefix that it was sampled under. Sequences
are int32 bytes, found by (length, last ids) and confirmed by one comparison: O(prompt) a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinkerscript.rollouts.call import Call, full_prompts, unpack_ids, unpack_logprobs
from tinkerscript.rollouts.types import Rollout, Segment

TAIL_BYTES = 8 * 4
"""Bytes of the last 8 ids, part of a sequence's key."""

Key = tuple[int, bytes]


class _OpenSequence:
    """A sequence that later calls may still extend."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.segments: list[Segment] = []

    @property
    def key(self) -> Key:
        return len(self.data), bytes(self.data[-TAIL_BYTES:])

    def extend(self, prompt: bytes, call: Call) -> None:
        self.data += prompt[len(self.data) :]
        start = len(self.data) // 4
        self.data += call.sampled
        self.segments.append(Segment(call, start, len(self.data) // 4))

    def close(self, episode_uuid: str) -> Rollout:
        tokens = unpack_ids(bytes(self.data))
        sampled = np.zeros(len(tokens), dtype=np.bool_)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        for segment in self.segments:
            sampled[segment.start : segment.end] = True
            logprobs[segment.start : segment.end] = unpack_logprobs(segment.call.logprobs)
        return Rollout(episode_uuid, tokens, sampled, logprobs, tuple(self.segments))


def merge_calls(calls: Sequence[Call], *, episode_uuid: str) -> tuple[Rollout, ...]:
    """The fewest sequences that hold every sampled token of `calls` once, under its own prefix.

    `calls` come in the order in which they were recorded, parents before children. Calls that
    sampled nothing are left out. Raises ValueError for a call whose parent is missing.
    """
    prompts = full_prompts(calls)
    sequences: list[_OpenSequence] = []
    index: dict[Key, list[_OpenSequence]] = {}
    for call in calls:
        if not call.sampled:
            continue
        prompt = prompts[call.call_id]
        sequence = _find(index, prompt)
        if sequence is None:
            sequence = _OpenSequence()
            sequences.append(sequence)
        else:
            index[sequence.key].remove(sequence)
        sequence.extend(prompt, call)
        index.setdefault(sequence.key, []).append(sequence)
    return tuple(sequence.close(episode_uuid) for sequence in sequences)


def _find(index: dict[Key, list[_OpenSequence]], prompt: bytes) -> _OpenSequence | None:
    """The longest open sequence that is a prefix of `prompt`."""
    lengths = sorted({length for length, _ in index if length <= len(prompt)}, reverse=True)
    for length in lengths:
        key = (length, prompt[max(0, length - TAIL_BYTES) : length])
        for sequence in index.get(key, ()):
            if prompt.startswith(sequence.data):
                return sequence
    return None
