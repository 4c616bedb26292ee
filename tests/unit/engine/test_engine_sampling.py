"""The embedded engine samples what it says it samples, and its thread is fair and answers every request."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from engine_helpers import own_logprobs
from small_models import sft_datum
from tinkerscript.engine import embedded
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.sampling import RowSettings, choose, truncate
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient as Client
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError
from tinkerscript.rollouts.call import TokenConstraint


def ints(*ids: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(ids))


@pytest.fixture
def client(engine: EmbeddedEngine) -> Client:
    return engine.create_sampling_client().result()


@contextmanager
def held_up(engine: EmbeddedEngine) -> Generator[None]:
    """Requests that are made meanwhile are all there before the engine's thread goes on."""
    gate = threading.Event()
    engine.context.thread.call(lambda: gate.wait(10))
    yield
    gate.set()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_equal_a_plain_forward_pass_for_requests_that_join_mid_batch(
    client: Client, random_model: Path, temperature: float
) -> None:
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7], [20, 21]]
    params = tinker.SamplingParams(max_tokens=30, temperature=temperature, stop=[])
    futures = []
    for prompt in prompts:
        futures.append((prompt, client.sample(ints(*prompt), 3, params)))
        # The engine is at work on those before: this one joins the running batch.
        client.compute_logprobs(ints(2, 3)).result()
    model = load_model(random_model)
    for prompt, future in futures:
        for sequence in future.result().sequences:
            expected = own_logprobs(model, prompt + sequence.tokens, temperature=temperature)[-30:]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=3e-5)


def test_sampled_frequencies_are_the_models_probabilities(client: Client, random_model: Path) -> None:
    count = 4000
    response = client.sample(ints(3, 9), count, tinker.SamplingParams(max_tokens=1, stop=[])).result()
    seen = np.bincount([s.tokens[0] for s in response.sequences], minlength=64) / count
    with torch.no_grad():
        logits = load_model(random_model)(input_ids=torch.tensor([[3, 9]])).logits[0, -1]
    probabilities = logits.softmax(-1).numpy()
    deviations = np.sqrt(probabilities * (1 - probabilities) / count)
    assert (np.abs(seen - probabilities) <= 5 * deviations + 1e-9).all()


def test_stop_ids_end_a_sequence_with_the_id_included(client: Client) -> None:
    params = tinker.SamplingParams(max_tokens=40, stop=list(range(0, 64, 2)))
    for sequence in client.sample(ints(5), 20, params).result().sequences:
        *rest, last = sequence.tokens
        assert sequence.stop_reason == "stop"
        assert last % 2 == 0
        assert all(token % 2 for token in rest)


def test_a_stop_string_ends_with_the_token_that_completes_it(client: Client) -> None:
    params = tinker.SamplingParams(max_tokens=40, stop=["w7", "w3 w"])
    for sequence in client.sample(ints(5), 30, params).result().sequences:
        text = " ".join(f"w{token}" for token in sequence.tokens)
        before = " ".join(f"w{token}" for token in sequence.tokens[:-1])
        assert "w7" not in before
        assert "w3 w" not in before
        if sequence.stop_reason == "stop":
            assert "w7" in text or "w3 w" in text or sequence.tokens[-1] == 1


def test_prompt_logprobs_do_not_wait_on_the_thread_that_computes_them(
    random_model: Path, tmp_path: Path
) -> None:
    """The rows are finished between two microbatches, before the prompt's turn has come."""
    rows = np.random.default_rng(0).integers(0, 64, (400, 41))
    engine = EmbeddedEngine(random_model, checkpoint_dir=tmp_path)
    training = engine.create_training_client()
    client = training.save_weights_and_get_sampling_client().result()
    prompt = [5, 9, 33, 2, 17]
    params = tinker.SamplingParams(max_tokens=1, stop=[])
    with held_up(engine):
        trained = training.forward_backward([sft_datum(ids) for ids in rows], "cross_entropy")
        asked = client.sample(ints(*prompt), 1, params, include_prompt_logprobs=True)
    found = asked.result(timeout=30).prompt_logprobs
    assert found is not None
    assert found[0] is None
    np.testing.assert_allclose(found[1:], own_logprobs(load_model(random_model), prompt), atol=3e-5)
    assert len(trained.result(timeout=60).loss_fn_outputs) == 400
    engine.close()  # Not in a context manager: if the thread waits for itself, this never returns.


def test_an_engine_that_cannot_be_made_leaves_no_thread(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bool:
        raise ValueError("broken")

    def threads() -> set[threading.Thread]:
        """Only the engine's: the loader of transformers leaves its own to end by themselves."""
        return {thread for thread in threading.enumerate() if thread.name == "tinkerscript-engine"}

    monkeypatch.setattr(embedded, "shares_prefixes", broken)
    before = threads()
    with pytest.raises(ValueError, match="broken"):
        EmbeddedEngine(random_model, checkpoint_dir=tmp_path)
    assert threads() <= before


def test_closing_the_engine_fails_what_is_unfinished(random_model: Path, tmp_path: Path) -> None:
    engine = EmbeddedEngine(random_model, checkpoint_dir=tmp_path)
    client = engine.create_sampling_client().result()
    with held_up(engine):
        future = client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=5))
        closing = threading.Thread(target=engine.close)
        closing.start()
    closing.join()
    with pytest.raises(EngineError, match="closed"):
        future.result(timeout=5)
    with pytest.raises(EngineError, match="closed"):
        client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=5))


def test_closing_fails_a_job_between_two_slices(random_model: Path, tmp_path: Path) -> None:
    engine = EmbeddedEngine(random_model, checkpoint_dir=tmp_path)
    began = threading.Event()

    def slices() -> Generator[None]:
        while True:
            began.set()
            yield

    job, behind = engine.context.thread.call_in_slices(slices), engine.context.thread.call(int)
    began.wait(10)
    engine.close()
    for future in (job, behind):
        with pytest.raises(EngineError, match="closed"):
            future.result(timeout=5)


def test_a_cancelled_request_frees_its_rows(engine: EmbeddedEngine, client: Client) -> None:
    with held_up(engine):
        abandoned = client.sample(ints(5), 4, tinker.SamplingParams(max_tokens=40, stop=[]))
        assert abandoned.future().cancel()
    kept = client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=3, stop=[])).result(timeout=10)
    assert len(kept.sequences[0].tokens) == 3


def settings(rows: int, temperature: float = 1.0, top_k: int = -1) -> RowSettings:
    return RowSettings(
        torch.full((rows,), temperature),
        torch.ones(rows),
        torch.full((rows,), top_k),
        torch.zeros(rows),
        plain=temperature == 1 and top_k <= 0,
        truncated=top_k > 0,
    )


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p", "kept"),
    [
        (0.5, -1, 0.0, [1]),
        (0.51, -1, 0.0, [1, 3]),
        (1.0, 3, 0.0, [1, 2, 3]),
        (0.01, -1, 0.0, [1]),
        (1.0, -1, 0.3, [1, 2, 3]),
        (1.0, -1, 0.5, [1, 3]),
        (1.0, -1, 1.0, [1]),
        # Min-p first: what is left reaches top-p with fewer tokens.
        (0.6, -1, 0.5, [1]),
    ],
)
def test_truncation_keeps_the_smallest_set_that_reaches_top_p(
    top_p: float, top_k: int, min_p: float, kept: list[int]
) -> None:
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    truncated = truncate(weights, torch.tensor([top_p]), torch.tensor([top_k]), torch.tensor([min_p]))
    assert truncated.nonzero()[:, 1].tolist() == kept


NONE, CUT, FORCED = TokenConstraint.NONE, TokenConstraint.CUT, TokenConstraint.FORCED
GRAMMARS: list[tuple[list[float], list[bool], TokenConstraint]] = [
    # Logits, what the grammar allows, and what it did. The fourth id has no probability here:
    ([0.0, 1.0, 2.0, -math.inf], [True, True, True, True], NONE),
    ([0.0, 1.0, 2.0, -math.inf], [True, True, True, False], NONE),
    ([0.0, 1.0, 2.0, -math.inf], [False, True, False, False], FORCED),
    ([0.0, 1.0, 2.0, -200.0], [True, True, True, False], NONE),  # e^-202 is 0 in float32
    ([0.0, 1.0, 2.0, -10.0], [True, True, True, False], CUT),
    ([50.0, 0.0, 0.0, 0.0], [True, False, False, False], FORCED),
    # All that is allowed is next to impossible:
    ([0.0, 3.0, -300.0, -300.0], [False, False, True, True], CUT),
    ([0.0, 3.0, -300.0, -300.0], [False, False, True, False], FORCED),
]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, -1), (1.0, 1), (0.0, -1)])
def test_a_choice_is_allowed_and_is_free_cut_or_forced(temperature: float, top_k: int) -> None:
    """The logprobs are those of the distribution before the grammar."""
    logits, allowed = (torch.tensor([row[column] for row in GRAMMARS]) for column in (0, 1))
    rows = len(logits)
    chosen = choose(logits, torch.full((rows,), 0.5), settings(rows, temperature, top_k), allowed)
    assert chosen.constraints is not None
    assert chosen.constraints.tolist() == [constraint for *_, constraint in GRAMMARS]
    assert allowed[range(rows), chosen.ids].all()
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1)[range(rows), chosen.ids])


def test_a_hot_distribution_has_more_to_cut() -> None:
    """Probabilities are those after temperature."""
    logits, allowed, _ = GRAMMARS[3]
    chosen = choose(torch.tensor([logits]), torch.tensor([0.5]), settings(1, 10.0), torch.tensor([allowed]))
    assert chosen.constraints is not None
    assert chosen.constraints.tolist() == [CUT]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24])
@pytest.mark.parametrize("top_k", [-1, 3])
def test_an_id_without_weight_is_never_chosen(uniform: float, top_k: int) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    assert choose(logits, torch.tensor([uniform]), settings(1, top_k=top_k)).ids.item() in (1, 3)


def test_a_stop_string_is_found_that_other_weights_have_begun(client: Client) -> None:
    prompt, greedy = [5], tinker.SamplingParams(max_tokens=12, stop=[], temperature=0)
    ids = client.sample(ints(*prompt), 1, greedy).result().sequences[0].tokens
    across = tinker.SamplingParams(max_tokens=12, stop=f"w{ids[2]} w{ids[3]}", temperature=0)
    for sampled, wanted in ((3, ids[3:4]), (0, None)):
        rows = client.sample_rows([*prompt, *ids[:3]], 1, across, sampled=sampled).result()
        assert (rows[0].ids == wanted) == (sampled > 0)


def test_cutting_ends_all_samples_between_two_slices_of_a_job(engine: EmbeddedEngine, client: Client) -> None:
    """Training may take long; sampling does not wait for it, and later jobs do."""
    other = engine.create_sampling_client().result()
    began, go_on = threading.Event(), threading.Event()

    def job() -> Generator[None]:
        began.set()
        while not go_on.is_set():
            yield

    slow = engine.context.thread.call_in_slices(job)
    after = engine.context.thread.call(slow.done)
    params = tinker.SamplingParams(max_tokens=40, stop=[])
    began.wait(timeout=20)
    client.cut()
    rows = client.sample_rows([3, 4], 2, params).result(timeout=20)
    assert [(row.ids, row.stop_reason) for row in rows] == [([], "cut")] * 2
    assert len(other.sample(ints(3, 4), 1, params).result(timeout=20).sequences[0].tokens) == 40
    assert not slow.done()
    assert not after.done()
    go_on.set()
    slow.result(timeout=20)
    assert after.result(timeout=20)
