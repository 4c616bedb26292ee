"""Steps from graphs are the steps that they were captured from. On a CPU a graph is a function run again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import numpy as np
import pytest
from torch import Tensor

from engine_helpers import assert_same, batch_over, seeded
from engine_helpers import sampled as sampled_by
from small_models import small_model
from tinkerscript.engine.decoder import FusedDecoder, decoder_for
from tinkerscript.engine.running_batch import Request, SampledRow
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
    batch = batch_over(decoder, max_rows=8)
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
        seeded(
            random.integers(0, 64, random.integers(1, 400)).tolist(),
            int(random.integers(1, 150)),
            samples=int(random.integers(1, 4)),
            seed=number,
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
    assert_same(found, expected)
    assert capture.captured > 3
    assert capture.replayed > 3 * capture.captured


def test_a_decoder_with_graphs_is_proved_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof keeps the logits of all its steps, of which graphs write several into one place."""
    capture = Recorded()
    monkeypatch.setattr(FusedDecoder, "_new_graphs", lambda _: StepGraphs(capture))
    assert decoder_for(small_model("Qwen3", **SHAPE), frozen=True) is FusedDecoder
    assert capture.replayed > 1


def test_a_version_goes_with_its_last_user() -> None:
    """Its weights, its graphs and what it keeps of texts hold the memory that the next version needs, which
    begins before any garbage collection."""
    decoder = FusedDecoder(small_model("Qwen3", **SHAPE))
    decoder._graphs = StepGraphs(lambda run: (run(), lambda: None))
    batch = batch_over(decoder)
    texts = [seeded(range(64), 5), seeded([*range(64), *range(50)], 5)]
    sampled_by(batch, *texts)
    nodes = list(batch._prefixes._nodes)
    assert len(nodes) > 1
    held = [ref(decoder), *(ref(each) for each in nodes)]
    gc.disable()
    try:
        del decoder, batch, nodes, texts
        assert {each() for each in held} == {None}
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
    assert_same(found, expected)
    assert len(refused) == caplog.text.count("without a CUDA graph: CUDA out of memory") > 3
    steps = sum(len(row.ids) for rows in found for row in rows)
    assert len(refused) < steps / 20, "a storage is tried once"
