"""`StepGraphs`: a decoder's steps as CUDA graphs.

A graph launches a step's kernels at once, which saves most of the time, but with fixed addresses and shapes:
it computes the cache's whole storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tinkerscript.engine.kv_cache import RowGroup

Groups = Sequence[RowGroup[Any]]

Run = Callable[[Tensor, Sequence[Tensor], Groups], Tensor]
"""ids (room,), the lengths (rows,) in each group's storage, groups -> logits (room, V)."""

Replay = Callable[[], None]

logger = logging.getLogger(__name__)


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

    def __init__(self, capture: Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]) -> None:
        """`capture` takes a function, and returns its result and a function that launches the same kernels
        again, into the same result.
        """
        self._capture = capture
        self._met: list[int] = []
        self._refused: list[int] = []
        self._captured: _Captured | None = None

    def step(self, run: Run, ids: Tensor, groups: Groups) -> Tensor | None:
        """ids (n,) -> logits (n, V); None: use no graph.

        `run` comes with each step, because a decoder that its graphs refer to would outlive its version.
        """
        storages = [group.storage for group in groups]
        captured = self._captured
        if captured is None or captured.storages != storages:
            self._captured = captured = None  # Frees its memory.
            if storages != self._met:
                self._met = storages
                return None
            if storages == self._refused:
                return None
            try:
                captured = self._captured_step(run, ids, groups, storages)
            except RuntimeError as error:  # Probably out of memory, of which a graph needs some of its own.
                logger.warning("decoding goes on without a CUDA graph: %s", error)
                self._refused = storages
                return None
        _write(captured.ids, captured.lengths, ids, groups)
        captured.replay()
        self._captured = captured
        return torch.cat([captured.logits[begin:end] for begin, end in _live(groups)])

    def _captured_step(self, run: Run, ids: Tensor, groups: Groups, storages: list[int]) -> _Captured:
        rooms = [group.room_for_rows for group in groups]
        padded, lengths = ids.new_zeros(sum(rooms)), ids.new_zeros(sum(rooms))
        _write(padded, lengths, ids, groups)  # Capturing may run the step.
        logits, replay = self._capture(lambda: run(padded, lengths.split(rooms), groups))
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


def cuda_graph(device: torch.device, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    with torch.cuda.device(device):  # Streams and graphs belong to the current one.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The first call initializes libraries, which a graph must not do.
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Each graph gets its own cuBLAS workspace: one that graphs share would go with the first of them.
        _clear_workspaces()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = run()
        _clear_workspaces()
    return logits, graph.replay


def _clear_workspaces() -> None:
    clear: Any = torch._C._cuda_clearCublasWorkspaces  # pyright: ignore
    clear()
