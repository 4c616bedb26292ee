"""`RunningBatch` on failure: what fails for one row fails its request, and no other notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_helpers import assert_same, run, sampled
from engine_helpers import batch_over as unbounded
from tinkerscript.engine.decoder import FusedDecoder
from tinkerscript.engine.kv_cache import RowState
from tinkerscript.engine.running_batch import Request, RunningBatch, SampledRow
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError

BAD = 9
"""The id that the prompt of the request that fails has, and no other prompt."""


class FaultyDecoder(FusedDecoder):
    """Fails where it sees `BAD`: runs out of memory in `prefill`, or gives logits that are no numbers."""

    fails_at: str = ""

    def prefill(
        self, ids: torch.Tensor, lengths: torch.Tensor, past: RowState | None = None, begin: int = 0
    ) -> tuple[torch.Tensor, list[RowState]]:
        there = (ids == BAD).any(-1)
        if self.fails_at == "prefill" and bool(there.any()):
            raise RuntimeError("out of memory")
        logits, states = super().prefill(ids, lengths, past, begin)
        if self.fails_at == "logits":
            logits[there] = torch.nan
        return logits, states


class FaultyMatcher:
    """A grammar that allows everything until `fails_at`: `allowed` or `take`."""

    def __init__(self, fails_at: str, after: int) -> None:
        self._fails_at, self._left = fails_at, after

    def allowed(self) -> Any:
        self._left -= 1
        if self._fails_at == "allowed" and self._left < 0:
            raise EngineError("the grammar allows nothing")
        return np.ones(64, np.bool_) if self._fails_at != "width" else np.ones(63, np.bool_)

    def take(self, token: int) -> None:
        if self._fails_at == "take" and self._left < 0:
            raise EngineError("the grammar does not allow it")


def batch_over(decoder: FusedDecoder, **settings: Any) -> RunningBatch:
    return unbounded(decoder, max_length=48, **({"max_rows": 8} | settings))


def fresh(folder: Path, **settings: Any) -> RunningBatch:
    return batch_over(FusedDecoder(load_model(folder)), **settings)


def seeded(*prompt: int, samples: int = 2, max_tokens: int = 12) -> Request:
    return Request(prompt, samples, max_tokens, 1.0, 1.0, -1, sum(prompt), frozenset(), ())


def matchers(fails_at: str, after: int = 0) -> dict[str, Any]:
    return {"matchers": [FaultyMatcher(fails_at, after) for _ in range(2)]}


def report(index: int, offset: int, *_: Any) -> None:
    if index and offset == 3:
        raise ValueError("the listener is gone")


def decode(ids: list[int]) -> str:
    if len(ids) > 4:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "no text")
    return ""


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "admission: the seed": ("", {"seed": "one"}, "unsupported operand"),
    "admission: a setting": ("", {"top_k": 2**70}, "verflow"),
    "prefill": ("prefill", {}, "out of memory"),
    "the model's logits": ("logits", {}, "not finite"),
    "the temperature": ("", {"temperature": float("nan")}, "not finite"),
    "the grammar's first mask": ("", matchers("allowed"), "allows nothing"),
    "a later mask": ("", matchers("allowed", after=7), "allows nothing"),
    "a mask of another vocabulary": ("", matchers("width"), "could not broadcast"),
    "the grammar's next state": ("", matchers("take"), "does not allow"),
    "the listener": ("", {"report": report}, "listener is gone"),
    "finishing: a stop string": ("", {"stop_strings": ("\ud800",)}, "surrogates"),
    "finishing: the text": ("", {"stop_strings": ("x",)}, "no text"),
}
"""Where a decoder fails, settings of the request that fails, and what is said."""


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_one_request_leaves_the_others_as_they_would_be(random_model: Path, fault: str) -> None:
    """Some run before it, some are admitted with it, and some wait until it has failed."""
    fails_at, settings, message = FAULTS[fault]

    def answers(*, faulty: bool) -> tuple[list[list[SampledRow]], BaseException | None]:
        decoder = FaultyDecoder(load_model(random_model))
        decoder.fails_at = fails_at if faulty else ""
        batch = batch_over(decoder, decode=decode)
        neighbors = [seeded(5, 6), seeded(7), seeded(8, 1, 2), seeded(3, 4, samples=4)]
        bad = seeded(BAD, 1)
        for name, value in settings.items() if faulty else ():
            setattr(bad, name, value)
        batch.submit(neighbors[0])
        batch.advance()
        batch.advance()
        for request in (neighbors[1], bad, *neighbors[2:]):
            batch.submit(request)
        run(batch)
        return [each.future.result(timeout=1) for each in neighbors], bad.future.exception(timeout=1)

    wanted, nothing = answers(faulty=False)
    found, error = answers(faulty=True)
    assert nothing is None
    assert message in str(error)
    assert_same(found, wanted)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, allows: Callable[[tuple[int, ...]], bool]) -> None:
    """No tensor for keys or values of a shape (rows, heads, length, width) that is not allowed."""
    zeros = torch.zeros

    def limited(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 4 and not allows(args):
            raise RuntimeError("out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", limited)


def test_a_row_without_memory_fails_and_those_beside_it_go_on(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run, and those that are admitted after it into the rows that there are."""
    batch = fresh(random_model)
    requests = [seeded(5, 6), seeded(7), seeded(8, 9, 1), seeded(3)]
    short_of_memory(monkeypatch, lambda shape: shape[0] <= 4)
    for request in requests:
        batch.submit(request)
    batch.advance()
    assert [each.future.done() for each in requests] == [False, False, True, True]
    batch.submit(again := seeded(8, 9, 1))
    run(batch)
    for request in requests[2:]:
        with pytest.raises(RuntimeError, match="out of memory"):
            request.future.result(timeout=1)
    monkeypatch.undo()
    wanted = sampled(fresh(random_model), seeded(5, 6), seeded(7))
    assert_same([each.future.result() for each in requests[:2]], wanted)
    assert isinstance(again.future.exception(timeout=1), RuntimeError)


@pytest.mark.parametrize("made", range(5))
def test_a_batch_goes_on_after_its_cache_could_not_grow(
    random_model: Path, monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """Memory runs out when some of the layers' keys and values have grown, and others have not."""
    batch = fresh(random_model)
    batch.submit(running := seeded(5))
    # Its row has room for the next token: memory is wanted for the rows of the next request.
    for _ in range(3):
        batch.advance()
    left = iter(range(made))
    with monkeypatch.context() as short:
        short_of_memory(short, lambda _: next(left, None) is not None)
        batch.submit(failed := seeded(6, 7))
        batch.advance()
    assert failed.future.done() == (made < 4)
    batch.submit(again := seeded(6, 7))
    run(batch)
    wanted = sampled(fresh(random_model), seeded(5), seeded(6, 7))
    assert_same([running.future.result(), again.future.result()], wanted)


def test_rows_that_are_cut_keep_what_they_have_and_later_ones_begin_elsewhere(random_model: Path) -> None:
    """What has ended stays whole, and a request that comes too late is given back at once."""
    batch = fresh(random_model, max_rows=3)
    running, mixed, waiting = seeded(5, 6), seeded(7, samples=1, max_tokens=2), seeded(8)
    for request in (running, mixed, waiting):
        batch.submit(request)
    for _ in range(4):
        batch.advance()
    batch.cut()
    assert not batch.busy
    batch.submit(late := seeded(9))
    assert not batch.busy
    (whole,) = sampled(fresh(random_model), seeded(5, 6))
    for row, wanted in zip(running.future.result(timeout=1), whole, strict=True):
        assert (row.ids, row.stop_reason) == (wanted.ids[: len(row.ids)], "cut")
        assert len(row.ids) == len(row.logprobs) == 4
    assert [row.stop_reason for row in mixed.future.result(timeout=1)] == ["length"]
    assert [(row.ids, row.stop_reason) for row in late.future.result(timeout=1)] == [([], "cut")] * 2
    (first, second) = waiting.future.result(timeout=1)
    assert (len(first.ids), len(second.ids)) == (3, 0), "one had the place of the row that ended"
