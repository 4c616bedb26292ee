"""Steps from graphs are the steps that they were captured from. On a CPU a graph is a function run again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import numpy as np
import pytest
from torch import Tensor

from small_models import small_model
from tinkerscript.engine.decoder import FusedDecoder, decoder_for
from tinkerscript.engine.running_batch import Request, RunningBatch, SampledRow
from tinkerscript.engine.step_graphs import Replay, StepGraphs

SHAPE = {"head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3}


class Recorded:
    """Captures by running a step, replays by running it again into the same tensor, and counts both."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        self.captured += 1
        logits = run()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(run())

        return logits, replay


def sampled(decoder: FusedDecoder, requests: list[Request]) -> list[list[SampledRow]]:
    """What they sample if one joins every few steps, so that rows join, outgrow their storage, and leave."""
    batch = RunningBatch(decoder, max_rows=8, max_length=1024, decode=str, random=np.random.default_rng(0))
    waiting = list(requests)
    steps = 0
    while waiting or batch.busy:
        if waiting and steps % 7 == 0:
            batch.submit(waiting.pop(0))
        batch.advance()
        steps += 1
    return [request.future.result() for request in requests]


def requests(seed: int) -> list[Request]:
    random = np.random.default_rng(seed)
    return [
        Request(
            tuple(random.integers(0, 64, random.integers(1, 400)).tolist()),
            num_samples=int(random.integers(1, 4)),
            max_tokens=int(random.integers(1, 150)),
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=number,
            stop_ids=frozenset(),
            stop_strings=(),
        )
        for number in range(12)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_graphs_sample_the_tokens_of_steps_without_them(seed: int) -> None:
    decoder = FusedDecoder(small_model("Qwen3", **SHAPE))
    expected = sampled(decoder, requests(seed))
    capture = Recorded()
    decoder._graphs = StepGraphs(capture)
    found = sampled(decoder, requests(seed))
    assert [[row.ids for row in rows] for rows in found] == [[row.ids for row in rows] for rows in expected]
    for rows, wanted in zip(found, expected, strict=True):
        for row, other in zip(rows, wanted, strict=True):
            np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)
    assert capture.captured > 3
    assert capture.replayed > 3 * capture.captured


def test_a_decoder_with_graphs_is_proved_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof keeps the logits of all its steps, of which graphs write several into one place."""
    capture = Recorded()
    monkeypatch.setattr(FusedDecoder, "_new_graphs", lambda _: StepGraphs(capture))
    assert decoder_for(small_model("Qwen3", **SHAPE), frozen=True) is FusedDecoder
    assert capture.replayed > 1


def test_a_version_goes_with_its_last_user() -> None:
    """Its weights and graphs hold the memory that the next version needs, before any garbage collection."""

    def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        logits = run()
        return logits, lambda: None

    decoder = FusedDecoder(small_model("Qwen3", **SHAPE))
    decoder._graphs = StepGraphs(capture)
    sampled(decoder, requests(0)[:2])
    version = ref(decoder)
    gc.disable()
    try:
        del decoder
        assert version() is None
    finally:
        gc.enable()


def test_rows_go_on_without_a_graph_that_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    decoder = FusedDecoder(small_model("Qwen3", **SHAPE))
    expected = sampled(decoder, requests(0))
    refused: list[int] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        refused.append(1)
        raise RuntimeError("CUDA out of memory")

    decoder._graphs = StepGraphs(capture)
    found = sampled(decoder, requests(0))
    assert [[row.ids for row in rows] for rows in found] == [[row.ids for row in rows] for rows in expected]
    assert len(refused) == caplog.text.count("without a CUDA graph: CUDA out of memory") > 3
    steps = sum(len(row.ids) for rows in found for row in rows)
    assert len(refused) < steps / 20, "a storage is tried once"
