"""Model folders, running batches, and logprobs by a plain forward pass, for the tests of the engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from model_families import FAMILIES
from tinkerscript.engine.decoder import Decoder
from tinkerscript.engine.kv_cache import CacheBudget
from tinkerscript.engine.running_batch import Request, RunningBatch, SampledRow


def family_model(name: str) -> Any:
    """A model of a family of `model_families`."""
    (family,) = (each for each in FAMILIES if each.name == name)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family.config).eval()
    for weight in model.parameters():
        weight.data *= family.scale if weight.dim() > 1 else 1
    return model


def saved(model: Any, folder: Path, tokenizer: Path) -> Path:
    """Write the model to `folder`, with the tokenizer of the folder `tokenizer`."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def own_logprobs(model: Any, ids: Sequence[int], *, temperature: float = 1.0) -> np.ndarray:
    """Of each of `ids` after the first, by one forward pass of the Hugging Face model."""
    row = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=row).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0].numpy()


def batch_over(
    decoder: Decoder,
    total: float = float("inf"),
    **settings: Any,
) -> RunningBatch:
    """Of up to 64 rows of up to 1,024 tokens. `total`: bytes of its cache."""
    given: dict[str, Any] = {"max_rows": 64, "max_length": 1024, "decode": str}
    given |= {"random": np.random.default_rng(0), "budget": CacheBudget(total), **settings}
    return RunningBatch(decoder, **given)


def seeded(prompt: Sequence[int], max_tokens: int, samples: int = 1, seed: int = 1) -> Request:
    return Request(tuple(prompt), samples, max_tokens, 1.0, 1.0, -1, seed, frozenset(), ())


def run(batch: RunningBatch) -> None:
    while batch.busy:
        batch.advance()


def sampled(batch: RunningBatch, *requests: Request) -> list[list[SampledRow]]:
    for request in requests:
        batch.submit(request)
    run(batch)
    return [request.future.result(timeout=1) for request in requests]


def assert_same(found: Sequence[list[SampledRow]], wanted: Sequence[list[SampledRow]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert [row.ids for row in one] == [row.ids for row in other]
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
