"""`StepGraphs`: a decoder's steps as CUDA graphs.

On a GPU, the kernels of a step take much longer to launch one by one than to run. A graph launches all of
them at once, but every address and shape in it is fixed. So a graph computes the whole storage of the cache,
filled or not, and is captured again when the storage changes.
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
    """(room,): the newest token of each place for a row, in all groups; of no account where no row is."""

    lengths: Tensor
    """(room,)"""

    logits: Tensor
    """(room, V): what `replay` writes."""

    replay: Replay


class StepGraphs:
    """`step` gives the logits that `run` does, from a graph once it meets a storage for the second time: one
    that rows still join or outgrow at every token is not worth capturing."""

    def __init__(
        self,
        run: Callable[[Tensor, Sequence[Tensor], Groups], Tensor],
        capture: Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]],
    ) -> None:
        """`run`: ids (room,), the lengths (rows,) of each group's storage, groups -> logits (room, V).

        `capture`: a function that launches the same kernels each time -> what it returns, and how to launch
        them again, which overwrites that.
        """
        self._run = run
        self._capture = capture
        self._met: list[int] = []
        self._captured: _Captured | None = None

    def step(self, ids: Tensor, groups: Groups) -> Tensor | None:
        """ids (n,) of all rows -> logits (n, V), which hold until the next call; None: take the step without
        a graph this time."""
        storages = [group.storage for group in groups]
        captured = self._captured
        if captured is None or captured.storages != storages:
            self._captured = captured = None  # Its memory is free before more is taken.
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
        _write(padded, lengths, ids, groups)  # To capture may be to take the step.
        logits, replay = self._capture(lambda: self._run(padded, lengths.split(rooms), groups))
        return _Captured(storages, padded, lengths, logits, replay)


def _live(groups: Groups) -> list[tuple[int, int]]:
    """Where the rows of each group are among all places for rows."""
    begins = [0, *accumulate(group.room_for_rows for group in groups)]
    return [(begin, begin + len(group.rows)) for begin, group in zip(begins, groups, strict=False)]


def _write(padded: Tensor, lengths: Tensor, ids: Tensor, groups: Groups) -> None:
    """Write a graph's input. A place without a row has the length 0: what it writes, at position 0, the next
    row's prefill overwrites."""
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
    with torch.cuda.stream(side):  # Libraries take their workspaces at the first call, which no graph may do.
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = run()
    return logits, graph.replay
