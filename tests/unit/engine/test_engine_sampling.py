"""The embedded engine samples what it says it samples."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.sampling import RowSettings, choose, truncate
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError

LOGPROB_TOLERANCE = 3e-5


def ints(*ids: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(ids))


def reference_logprobs(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float
) -> np.ndarray:
    """Log probabilities of `response` [R] by one plain forward pass of the Hugging Face model."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float() / temperature
    picked = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    return picked[len(prompt) - 1 :].numpy()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_equal_a_plain_forward_pass_for_requests_that_join_mid_batch(
    engine: EmbeddedEngine, random_model: Path, temperature: float
) -> None:
    client = engine.create_sampling_client().result()
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
            expected = reference_logprobs(model, prompt, sequence.tokens, temperature)
            assert len(sequence.tokens) == 30
            np.testing.assert_allclose(sequence.logprobs, expected, atol=LOGPROB_TOLERANCE)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    seeded = tinker.SamplingParams(max_tokens=20, seed=7, stop=[])
    alone = client.sample(ints(4, 5), 2, seeded).result()
    crowd = [
        client.sample(ints(i, i + 1), 1, tinker.SamplingParams(max_tokens=25, stop=[])) for i in range(9)
    ]
    together = client.sample(ints(4, 5), 2, seeded).result()
    assert [s.tokens for s in alone.sequences] == [s.tokens for s in together.sequences]
    assert alone.sequences[0].tokens != alone.sequences[1].tokens
    assert all(len(future.result().sequences) == 1 for future in crowd)


def test_sampled_frequencies_are_the_models_probabilities(engine: EmbeddedEngine, random_model: Path) -> None:
    client = engine.create_sampling_client().result()
    count = 4000
    response = client.sample(ints(3, 9), count, tinker.SamplingParams(max_tokens=1, stop=[])).result()
    seen = np.bincount([s.tokens[0] for s in response.sequences], minlength=64) / count
    with torch.no_grad():
        probabilities = (
            load_model(random_model)(input_ids=torch.tensor([[3, 9]])).logits[0, -1].softmax(-1).numpy()
        )
    # Five standard deviations of a binomial proportion, for each of 64 ids.
    assert (
        np.abs(seen - probabilities) <= 5 * np.sqrt(probabilities * (1 - probabilities) / count) + 1e-9
    ).all()


def test_stop_ids_end_a_sequence_with_the_id_included(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    stop = list(range(0, 64, 2))
    for sequence in (
        client.sample(ints(5), 20, tinker.SamplingParams(max_tokens=40, stop=stop)).result().sequences
    ):
        *rest, last = sequence.tokens
        assert sequence.stop_reason == "stop"
        assert last % 2 == 0
        assert all(token % 2 for token in rest)


def test_a_stop_string_ends_with_the_token_that_completes_it(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=40, stop=["w7", "w3 w"])
    for sequence in client.sample(ints(5), 30, params).result().sequences:
        text = " ".join(f"w{token}" for token in sequence.tokens)
        before = " ".join(f"w{token}" for token in sequence.tokens[:-1])
        assert "w7" not in before
        assert "w3 w" not in before
        if sequence.stop_reason == "stop":
            assert "w7" in text or "w3 w" in text or sequence.tokens[-1] == 1


def test_the_context_ends_a_sequence(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    response = client.sample(ints(*range(2, 42)), 1, tinker.SamplingParams(max_tokens=500, stop=[])).result()
    assert response.sequences[0].stop_reason == "length"
    assert len(response.sequences[0].tokens) == engine.max_context - 40


def test_prompt_logprobs_equal_a_plain_forward_pass(engine: EmbeddedEngine, random_model: Path) -> None:
    client = engine.create_sampling_client().result()
    prompt = [5, 9, 33, 2, 17]
    params = tinker.SamplingParams(max_tokens=1)
    response = client.sample(ints(*prompt), 1, params, include_prompt_logprobs=True).result()
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    expected = reference_logprobs(load_model(random_model), prompt[:1], prompt[1:], 1.0)
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected, atol=LOGPROB_TOLERANCE)


def test_closing_the_engine_fails_what_is_unfinished(random_model: Path, tmp_path: Path) -> None:
    engine = EmbeddedEngine(random_model, checkpoint_dir=tmp_path)
    client = engine.create_sampling_client().result()
    gate = threading.Event()
    engine.context.thread.call(lambda: gate.wait(10))
    future = client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=5))
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.set()
    closing.join()
    with pytest.raises(EngineError, match="closed"):
        future.result(timeout=5)
    with pytest.raises(EngineError, match="closed"):
        client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=5))


def test_sampling_goes_on_between_the_slices_of_a_long_job(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    sampled = threading.Event()

    def slices() -> Generator[None, None, str]:
        while not sampled.is_set():
            yield
        return "trained"

    job = engine.context.thread.call_in_slices(slices)
    after = engine.context.thread.call(job.done)
    client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=5, stop=[])).result(timeout=10)
    assert not after.done()
    sampled.set()
    assert job.result(timeout=10) == "trained"
    assert after.result(timeout=10)


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


def test_a_cancelled_request_frees_its_rows(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    gate = threading.Event()
    engine.context.thread.call(lambda: gate.wait(10))
    abandoned = client.sample(ints(5), 4, tinker.SamplingParams(max_tokens=40, stop=[]))
    assert abandoned.future().cancel()
    gate.set()
    kept = client.sample(ints(5), 1, tinker.SamplingParams(max_tokens=3, stop=[])).result(timeout=10)
    assert len(kept.sequences[0].tokens) == 3


def settings(n: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> RowSettings:
    return RowSettings(
        temperature=torch.full((n,), temperature),
        top_p=torch.full((n,), top_p),
        top_k=torch.full((n,), top_k),
        min_p=torch.zeros(n),
        plain=False,
        truncated=top_p < 1 or top_k > 0,
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_allowed_is_never_chosen_and_the_logprob_is_the_free_one(temperature: float) -> None:
    """Also where all that is allowed is next to impossible."""
    logits = torch.tensor([[0.0, 3.0, -300.0, -300.0], [5.0, 3.0, 1.0, 0.0]])
    allowed = torch.tensor([[False, False, True, False], [True, True, True, True]])
    chosen = choose(logits, torch.tensor([0.5, 0.0]), settings(2, temperature=temperature), allowed)
    assert chosen.ids.tolist() == [2, 0]
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1)[[0, 1], chosen.ids])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24])
def test_an_id_without_weight_is_never_chosen(uniform: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    assert choose(logits, torch.tensor([uniform]), settings(1)).ids.item() in (1, 3)


def test_a_stop_string_is_found_that_other_weights_have_begun(engine: EmbeddedEngine) -> None:
    client = engine.create_sampling_client().result()
    prompt, greedy = [5], tinker.SamplingParams(max_tokens=12, stop=[], temperature=0)
    ids = client.sample(ints(*prompt), 1, greedy).result().sequences[0].tokens
    across = tinker.SamplingParams(max_tokens=12, stop=f"w{ids[2]} w{ids[3]}", temperature=0)
    for sampled, wanted in ((3, ids[3:4]), (0, None)):
        rows = client.sample_rows([*prompt, *ids[:3]], 1, across, sampled=sampled).result()
        assert (rows[0].ids == wanted) == (sampled > 0)


def test_cutting_ends_all_samples_between_two_slices_of_a_job(engine: EmbeddedEngine) -> None:
    """Training may take long; the newer weights do not wait for it."""
    client, other = (engine.create_sampling_client().result() for _ in range(2))
    began, go_on = threading.Event(), threading.Event()

    def job() -> Generator[None]:
        began.set()
        while not go_on.is_set():
            yield

    slow = engine.context.thread.call_in_slices(job)
    params = tinker.SamplingParams(max_tokens=40, stop=[])
    began.wait(timeout=20)
    client.cut()
    rows = client.sample_rows([3, 4], 2, params).result(timeout=20)
    assert [(row.ids, row.stop_reason) for row in rows] == [([], "cut")] * 2
    assert len(other.sample(ints(3, 4), 1, params).result(timeout=20).sequences[0].tokens) == 40
    assert not slow.done()
    go_on.set()
    slow.result(timeout=20)
