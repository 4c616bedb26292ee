"""`StepGraphs`: a decoder's steps as CUDA graphs.

A graph launches a step's kernels at once, which saves most of the time, but with fixed addresses and shapes:
it computes the cache's whole storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tinkerscript.engine.kv_cache import RowGroup

Groups = Sequence[RowGroup[Any]]

Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Captured:
    storages: list[int]
    ids: Tensor
    """(room,): the newest token in each row's place; arbitrary in empty places."""

    lengths: Tensor
    """(room,)"""

    logits: Tensor
    """(room, V): written by `replay`."""

    replay: Replay


class StepGraphs:
    """Captures a graph when a storage is met again. One that changes at every token would not pay."""

    def __init__(
        self,
        run: Callable[[Tensor, Sequence[Tensor], Groups], Tensor],
        capture: Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]],
    ) -> None:
        """`run`: ids (room,), the lengths (rows,) in each group's storage, groups -> logits (room, V).

        `capture` takes a function, and returns its result and a function that launches the same kernels
        again, into the same result.
        """
        self._run = run
        self._capture = capture
        self._met: list[int] = []
        self._captured: _Captured | None = None

    def step(self, ids: Tensor, groups: Groups) -> Tensor | None:
        """ids (n,) -> logits (n, V), valid until the next call; None: use no graph."""
        storages = [group.storage for group in groups]
        captured = self._captured
        if captured is None or captured.storages != storages:
            self._captured = captured = None  # Frees its memory.
            if storages != self._met:
                self._met = storages
                return None
            captured = self._captured_step(ids, groups, storages)
        _write(captured.ids, captured.lengths, ids, groups)
        captured.replay()
        self._captured = captured
        live = [captured.logits[begin:end] for begin, end in _live(groups)]
        return live[0] if len(live) == 1 else torch.cat(live)

    def _captured_step(self, ids: Tensor, groups: Groups, storages: list[int]) -> _Captured:
        rooms = [group.room_for_rows for group in groups]
        padded, lengths = ids.new_zeros(sum(rooms)), ids.new_zeros(sum(rooms))
        _write(padded, lengths, ids, groups)  # Capturing may run the step.
        logits, replay = self._capture(lambda: self._run(padded, lengths.split(rooms), groups))
        return _Captured(storages, padded, lengths, logits, replay)


def _live(groups: Groups) -> list[tuple[int, int]]:
    begins = [0, *accumulate(group.room_for_rows for group in groups)]
    return [(begin, begin + len(group.rows)) for begin, group in zip(begins, groups, strict=False)]


def _write(padded: Tensor, lengths: Tensor, ids: Tensor, groups: Groups) -> None:
    """Empty places get length 0: the next row's prefill overwrites position 0."""
    counts = [0] * len(padded)
    first = 0
    for (begin, end), group in zip(_live(groups), groups, strict=True):
        counts[begin:end] = group.lengths
        padded[begin:end] = ids[first : first + end - begin]
        first += end - begin
    lengths.copy_(torch.tensor(counts))


def cuda_graph(run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # The first call allocates workspaces, which a graph must not do.
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = run()
    return logits, graph.replay
