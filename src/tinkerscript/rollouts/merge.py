"""`merge_calls`: calls -> training sequences, by exact token prefix (docs/tokens.md).

A call costs only its new tokens, because sequences are found by (length, last ids) and one comparison.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from tinkerscript.rollouts.call import Call, PlacedImage, calls_of, moved_images, unpack_logprobs
from tinkerscript.rollouts.rollout import ByteArray, Rollout, Segment

NOT_RECORDED = 255  # Every byte of experts that were not recorded.

TAIL_BYTES = 8 * 4  # The last 8 ids are part of a sequence's key.
FORK_CANDIDATES = 32  # Newest sequences to search for the longest shared prefix.

Key = tuple[int, bytes]


class _Sequence:
    __slots__ = ("data", "fork", "images", "number", "parent", "segments")

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()
        self.images: list[PlacedImage] = []
        self.segments: list[Segment] = []
        self.parent: int | None = None
        self.fork = 0

    @property
    def key(self) -> Key:
        return len(self.data), bytes(self.data[-TAIL_BYTES:])

    def close(self, episode_uuid: str, trains_constrained: bool, calls: Mapping[str, Call]) -> Rollout:
        tokens = np.frombuffer(self.data, dtype="<i4")
        tokens.flags.writeable = False
        sampled = np.zeros(len(tokens), dtype=np.bool_)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        constrained = np.zeros(len(tokens), dtype=np.bool_)
        for segment in self.segments:
            span = slice(segment.start, segment.end)
            sampled[span] = True
            logprobs[span] = unpack_logprobs(segment.call.logprobs)
            if segment.call.constrained:
                constrained[span] = np.frombuffer(segment.call.constrained, np.uint8)
        return Rollout(
            episode_uuid,
            tokens,
            sampled,
            sampled if trains_constrained else sampled & ~constrained,
            logprobs,
            tuple(self.segments),
            parent=self.parent,
            fork=self.fork,
            experts=_experts(self.segments, len(tokens), calls),
            images=tuple(self.images),
        )


class _Stream(NamedTuple):
    """int32 bytes: `base` up to `length`, then `tail`."""

    base: _Sequence | None
    length: int
    tail: bytes
    images: list[PlacedImage]
    """Compared because two images have the same ids."""

    @property
    def size(self) -> int:
        return self.length + len(self.tail)

    def slice(self, start: int, end: int) -> bytes:
        length = self.length
        if start >= length:
            return self.tail[start - length : end - length]
        assert self.base is not None
        if end <= length:
            return bytes(self.base.data[start:end])
        return bytes(self.base.data[start:length]) + self.tail[: end - length]

    def starts_with(self, sequence: _Sequence) -> bool:
        size, shared = len(sequence.data), min(len(sequence.data), self.length)
        if sequence.images != [image for image in self.images if 4 * image.start < size]:
            return False
        with memoryview(sequence.data) as theirs:
            if self.base is not None and self.base is not sequence:
                with memoryview(self.base.data) as ours:
                    if not sequence.data.startswith(ours[:shared]):
                        return False
            return size <= self.length or self.tail.startswith(theirs[self.length :])


class _OpenSequences:
    def __init__(self) -> None:
        self.all: list[_Sequence] = []
        self._index: dict[Key, list[_Sequence]] = {}
        self._lengths: list[int] = []
        """The indexed sequences' lengths, sorted."""

        self._newest: deque[_Sequence] = deque(maxlen=FORK_CANDIDATES)

    def find(self, prompt: _Stream) -> _Sequence | None:
        """Remove and return the longest sequence that is a prefix of `prompt`."""
        slice_of, index = prompt.slice, self._index
        for length in self._lengths_up_to(prompt.size):
            key = (length, slice_of(length - TAIL_BYTES if length > TAIL_BYTES else 0, length))
            for sequence in index.get(key, ()):
                if prompt.starts_with(sequence):
                    self._take_out(key, sequence)
                    return sequence
        return None

    def _lengths_up_to(self, limit: int) -> Iterator[int]:
        before = -1
        for place in range(bisect_right(self._lengths, limit) - 1, -1, -1):
            if self._lengths[place] != before:
                before = self._lengths[place]
                yield before

    def _take_out(self, key: Key, sequence: _Sequence) -> None:
        same = self._index[key]
        same.remove(sequence)
        if not same:
            del self._index[key]
        del self._lengths[bisect_right(self._lengths, key[0]) - 1]

    def open(self, prompt: _Stream) -> _Sequence:
        sequence = _Sequence(len(self.all))
        sequence.data += prompt.slice(0, prompt.size)
        for other in reversed(self._newest):
            shared = _common_prefix(sequence.data, other.data, longer_than=sequence.fork)
            shared = _shared_images(prompt.images, other.images, shared)
            if shared > sequence.fork:
                sequence.parent, sequence.fork = other.number, shared
        self.all.append(sequence)
        self._newest.append(sequence)
        return sequence

    def put(self, sequence: _Sequence) -> None:
        self._index.setdefault(sequence.key, []).append(sequence)
        insort(self._lengths, len(sequence.data))


def merge_calls(
    calls: Sequence[Call], *, episode_uuid: str, trains_constrained: bool = False, role: str = ""
) -> tuple[Rollout, ...]:
    """Merge calls into sequences that hold every sampled token once, after its own prefix.

    `calls` list parents before children. Only calls of `role` (default: the policy) count.
    `trains_constrained`: tokens that a grammar constrained carry loss. Raises ValueError for a missing
    parent.
    """
    sequences = _OpenSequences()
    streams: dict[str, _Stream] = {}
    for call in calls_of(calls, role):
        prompt = _prompt(call, streams)
        if not call.sampled:
            streams[call.call_id] = prompt
            continue
        sequence = sequences.find(prompt) or sequences.open(prompt)
        if len(sequence.data) < prompt.size:
            sequence.data += prompt.slice(len(sequence.data), prompt.size)
        sequence.images = prompt.images
        start = len(sequence.data) // 4
        sequence.data += call.sampled
        sequence.segments.append(Segment(call, start, len(sequence.data) // 4))
        sequences.put(sequence)
        streams[call.call_id] = _Stream(sequence, len(sequence.data), b"", sequence.images)
    known = {call.call_id: call for call in calls} if any(call.experts for call in calls) else {}
    return tuple(sequence.close(episode_uuid, trains_constrained, known) for sequence in sequences.all)


def _experts(segments: Sequence[Segment], length: int, calls: Mapping[str, Call]) -> ByteArray | None:
    """Before a fork, the experts are on the parents' calls."""
    widths = {len(call.experts) // call.new_tokens for call in calls.values() if call.experts}
    if not widths:
        return None
    if len(widths) > 1:
        return np.empty((length, 0), np.uint8)
    (width,) = widths
    rows = np.full((length, width), NOT_RECORDED, np.uint8)
    done = 0
    for segment in segments:
        call: Call | None = segment.call
        end = segment.end
        while call is not None and end > done:
            begin = end - call.new_tokens
            if call.experts:
                rows[begin:end] = np.frombuffer(call.experts, np.uint8).reshape(-1, width)
            end, call = begin, calls.get(call.parent_id or "")
        done = segment.end
    return rows


def _prompt(call: Call, streams: dict[str, _Stream]) -> _Stream:
    if call.parent_id is None:
        return _Stream(None, 0, call.new_prompt, call.images)
    parent = streams.get(call.parent_id)
    if parent is None:
        raise ValueError(f"call {call.call_id}: its parent {call.parent_id} is not among the calls before it")
    images = [*parent.images, *moved_images(call.images, parent.size // 4)]
    return parent._replace(tail=parent.tail + call.new_prompt, images=images)


def _shared_images(ours: list[PlacedImage], theirs: list[PlacedImage], shared: int) -> int:
    """Cut `shared` ids before the first image that the other lacks there."""
    differing = [pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1]]
    return min([shared, *(image.start for pair in differing for image in pair if image)])


def _common_prefix(ours: bytearray, theirs: bytearray, *, longer_than: int) -> int:
    """Return the length in ids; 0 unless it exceeds `longer_than`."""
    enough = 4 * (longer_than + 1)
    with memoryview(ours) as view:
        if len(view) < enough or not theirs.startswith(view[:enough]):
            return 0
    length = min(len(ours), len(theirs)) // 4
    differs = np.frombuffer(ours, "<i4", length) != np.frombuffer(theirs, "<i4", length)
    return int(differs.argmax()) if differs.any() else length
