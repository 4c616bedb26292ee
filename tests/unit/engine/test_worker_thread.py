"""The engine's thread: it is fair, every request is answered, and it never waits for itself."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tinkerscript.engine import embedded
from tinkerscript.engine.context import EngineThread
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.running_batch import Alternatives
from tinkerscript.errors import EngineError


def ints(*ids: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(ids))


def some_data(count: int, length: int) -> list[tinker.Datum]:
    rows = np.random.default_rng(0).integers(0, 64, (count, length + 1))
    return [
        tinker.Datum(
            model_input=ints(*ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": np.ones(length, np.float32)},
        )
        for ids in rows
    ]


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


def test_a_sample_with_prompt_logprobs_can_be_cancelled(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    gate = threading.Event()
    engine.context.thread.call(lambda: gate.wait(10))
    params = tinker.SamplingParams(max_tokens=40, stop=[])
    abandoned = client.sample(ints(5, 6), 1, params, include_prompt_logprobs=True)
    assert abandoned.future().cancel()
    gate.set()
    kept = client.sample(ints(5, 6), 1, params, include_prompt_logprobs=True).result(timeout=10)
    assert len(kept.sequences[0].tokens) == 40


def test_sampling_goes_on_between_jobs_of_one_piece(engine: EmbeddedEngine) -> None:
    """For as long as the job before it took: more than one token in a fifth of a second."""
    client = engine.create_sampling_client().result()
    events: list[str] = []

    def report(index: int, offset: int, token: int, logprob: float, top: Alternatives) -> None:
        events.append("token")

    def job() -> None:
        threading.Event().wait(0.2)
        events.append("job")

    gate = threading.Event()
    engine.context.thread.call(lambda: gate.wait(10))
    params = tinker.SamplingParams(max_tokens=40, stop=[])
    rows = client.sample_rows([5, 6], 1, params, report=report)
    jobs = [engine.context.thread.call(job) for _ in range(3)]
    gate.set()
    for future in (rows, *jobs):
        future.result(timeout=30)
    first, second = [place for place, event in enumerate(events) if event == "job"][:2]
    assert second - first > 2


class LateInbox:
    """An inbox in which a job arrives late: when `gate` opens."""

    def __init__(self, inbox: Any, gate: threading.Event) -> None:
        self._inbox = inbox
        self._gate = gate
        self.entered = threading.Event()

    def put(self, item: Any) -> None:
        if item is not None:
            self.entered.set()
            self._gate.wait(10)
        self._inbox.put(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


def test_what_is_asked_while_the_engine_closes_is_done_or_failed() -> None:
    thread: Any = EngineThread()
    gate = threading.Event()
    thread._inbox = inbox = LateInbox(thread._inbox, gate)
    found: list[Future[int]] = []
    asking = threading.Thread(target=lambda: found.append(thread.call(int)))
    asking.start()
    assert inbox.entered.wait(10)
    closing = threading.Thread(target=thread.close)
    closing.start()
    closing.join(timeout=0.3)  # Closing must not overtake the job: it waits here.
    gate.set()
    asking.join(10)
    closing.join(10)
    error = found[0].exception(timeout=0)
    assert found[0].result() == 0 if error is None else "the engine is closed" in str(error)
    with pytest.raises(EngineError, match="closed"):
        thread.call(int)


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
