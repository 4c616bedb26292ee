"""`RunningBatch` on failure: every request gets the error, and the batch goes on."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkerscript.engine.decoder import FusedDecoder, KVCache
from tinkerscript.engine.running_batch import Request, RunningBatch, SampledRow
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError


class FaultyDecoder(FusedDecoder):
    """Runs out of memory for prompts of more than two tokens."""

    def prefill(
        self, ids: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        if ids.shape[1] > 2:
            raise RuntimeError("out of memory")
        return super().prefill(ids, lengths)


def batch_over(decoder: FusedDecoder, max_rows: int = 8) -> RunningBatch:
    return RunningBatch(
        decoder, max_rows=max_rows, max_length=48, decode=str, random=np.random.default_rng(0)
    )


def greedy(*prompt: int, max_tokens: int = 3) -> Request:
    return Request(prompt, 2, max_tokens, 0.0, 1.0, -1, None, frozenset(), ())


def fail_to_advance(batch: RunningBatch) -> None:
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        batch.advance()
    batch.fail(caught.value)


def test_requests_whose_prefill_fails_are_told(random_model: Path) -> None:
    batch = batch_over(FaultyDecoder(load_model(random_model)))
    running, long = greedy(5, 6), greedy(5, 6, 7)
    batch.submit(running)
    batch.advance()
    batch.submit(long)
    fail_to_advance(batch)
    for request in (running, long):
        with pytest.raises(RuntimeError, match="out of memory"):
            request.future.result(timeout=1)
    batch.submit(again := greedy(5, 6))
    while batch.busy:
        batch.advance()
    assert len(again.future.result(timeout=1)[1].ids) == 3


def test_requests_for_whose_rows_there_is_no_memory_are_told(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before the row that failed, those that were to be admitted after it, and those that wait."""
    reserve = KVCache.reserve

    def small(self: KVCache, rows: int, length: int, like: list[torch.Tensor]) -> None:
        if rows > 3:
            raise RuntimeError("out of memory")
        reserve(self, rows, length, like)

    monkeypatch.setattr(KVCache, "reserve", small)
    batch = batch_over(FusedDecoder(load_model(random_model)), max_rows=7)
    requests = [greedy(5, 6), greedy(7), greedy(8, 9), greedy(3)]
    for request in requests:
        batch.submit(request)
    fail_to_advance(batch)
    for request in requests:
        with pytest.raises(RuntimeError, match="out of memory"):
            request.future.result(timeout=1)


def test_a_batch_goes_on_after_its_cache_could_not_grow(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out when the keys have grown and the values have not."""
    batch = batch_over(FusedDecoder(load_model(random_model)))
    batch.submit(greedy(5))
    batch.advance()
    zeros, calls = torch.zeros, iter(range(3))

    def limited(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 4 and next(calls) == 2:  # Keys of two layers are there.
            raise RuntimeError("out of memory")
        return zeros(*args, **kwargs)

    with monkeypatch.context() as short:
        short.setattr(torch, "zeros", limited)
        batch.submit(greedy(6))
        fail_to_advance(batch)
    batch.submit(again := greedy(6))
    while batch.busy:
        batch.advance()
    assert [len(row.ids) for row in again.future.result(timeout=1)] == [3, 3]


class CancelledMeanwhile(Future[list[SampledRow]]):
    """Its caller cancels at the last moment."""

    def set_exception(self, exception: BaseException | None) -> None:
        self.cancel()
        super().set_exception(exception)


def test_a_failure_that_meets_a_cancellation_reaches_the_others(random_model: Path) -> None:
    batch = batch_over(FusedDecoder(load_model(random_model)))
    cancelled, other = greedy(5), greedy(6)
    cancelled.future = CancelledMeanwhile()
    batch.submit(cancelled)
    batch.submit(other)
    batch.fail(EngineError("the engine is closed"))
    assert cancelled.future.cancelled()
    assert isinstance(other.future.exception(timeout=1), EngineError)
