"""The engine's thread: it is fair, every request is answered, and it never waits for itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from small_models import sft_datum
from tinkerscript.engine import embedded
from tinkerscript.engine.embedded import EmbeddedEngine


def ints(*ids: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(ids))


def some_data(count: int, length: int) -> list[tinker.Datum]:
    return [sft_datum(ids) for ids in np.random.default_rng(0).integers(0, 64, (count, length + 1))]


def test_prompt_logprobs_do_not_wait_on_the_thread_that_computes_them(
    random_model: Path, tmp_path: Path
) -> None:
    """The rows are finished between two microbatches, before the prompt's turn has come."""
    engine = EmbeddedEngine(random_model, checkpoint_dir=tmp_path)
    training = engine.create_training_client()
    client = training.save_weights_and_get_sampling_client().result()
    gate = threading.Event()
    engine.context.thread.call(lambda: gate.wait(10))
    trained = training.forward_backward(some_data(400, 40), "cross_entropy")
    params = tinker.SamplingParams(max_tokens=1, stop=[])
    asked = client.sample(ints(5, 9, 33), 1, params, include_prompt_logprobs=True)
    gate.set()
    response = asked.result(timeout=30)
    assert response.prompt_logprobs is not None
    assert len(response.prompt_logprobs) == 3
    assert len(trained.result(timeout=60).loss_fn_outputs) == 400
    engine.close()  # Not in a context manager: if the thread waits for itself, this never returns.


@pytest.mark.parametrize("fault", ["seed", "shares_prefixes"])
def test_an_engine_that_cannot_be_made_leaves_no_thread(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(*_: Any) -> bool:
        raise ValueError("broken")

    if fault == "shares_prefixes":
        monkeypatch.setattr(embedded, "shares_prefixes", broken)
    before = engine_threads()
    with pytest.raises(ValueError, match=r"non-negative|broken"):
        EmbeddedEngine(random_model, checkpoint_dir=tmp_path, seed=-1 if fault == "seed" else 0)
    assert engine_threads() <= before


def engine_threads() -> set[threading.Thread]:
    """Only the engine's: the loader of transformers leaves its own to end by themselves."""
    return {thread for thread in threading.enumerate() if thread.name == "tinkerscript-engine"}
