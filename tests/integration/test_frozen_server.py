"""A frozen role at a vLLM server: what it scores, and a server that lacks something, is down or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_vllm import FakeVllm
from inference_fakes import Distribution, Faults
from serving import serving
from tinkerscript.config import RoleConfig
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.sampler import SampleRequest
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.backends.backend import FrozenModel
from tinkerscript.train.frozen_model import open_frozen_role

SEQUENCES = [np.array(ids, np.int32) for ids in ([5, 6, 7, 8], [9, 10], [11])]


class EveryText(dict[str, list[int]]):
    """What `/tokenize` answers: any text, by the model's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        super().__init__({"": []})
        self._tokenizer = LightTokenizer(folder)

    def __missing__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def made(folder: Path, **faults: Any) -> FakeVllm:
    tokenizer = LightTokenizer(folder)
    assert tokenizer.eos_token_id is not None
    distribution = Distribution(tokenizer.vocab_size, tokenizer.eos_token_id)
    options: dict[str, Any] = {"tokenizer": EveryText(folder), **faults}
    return FakeVllm(distribution, Faults(**options))


@asynccontextmanager
async def opened(
    fake: FakeVllm,
    folder: Path,
    notes: list[str],
    *,
    timeout_s: float = 5,
    max_wait_s: float = 600,
    **role: Any,
) -> AsyncGenerator[FrozenModel]:
    with serving(fake.app) as url:
        section = RoleConfig.model_validate({"kind": "frozen", "base_url": url, **role})
        unused: Any = None
        async with open_frozen_role(
            "t",
            section,
            unused,
            folder=folder,
            note=notes.append,
            timeout_s=timeout_s,
            max_wait_s=max_wait_s,
            environ={"T_KEY": "s3cret"},
        ) as model:
            yield model


async def test_it_scores_and_samples_by_token_ids(byte_model: Path) -> None:
    fake = made(byte_model, key="s3cret", weights=["7"])
    async with opened(fake, byte_model, [], api_key_env="T_KEY") as model:
        assert (model.folder, model.max_context) == (byte_model, 4096)
        rows = await model.logprobs(SEQUENCES)
        for ids, row in zip(SEQUENCES, rows, strict=True):
            own = [0.0, *(float(x) for x in fake.score(ids.tolist())[1:] if x is not None)]
            np.testing.assert_allclose(row, own, atol=1e-5)
        result = await model.sampler.sample(SampleRequest(prompt=pack_ids([5, 6]), max_tokens=4))
        assert result.policy_version == -1


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"scores": False}, "roles.t: http://.* does not score prompts"),
        ({"tokenizer": {}}, "roles.t: the model at http://.* has no /tokenize"),
        ({"key": "another"}, "roles.t: .*refused our key"),
    ],
)
async def test_a_server_that_cannot_be_a_teacher_is_refused(
    byte_model: Path, faults: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        async with opened(made(byte_model, **faults), byte_model, [], api_key_env="T_KEY"):
            pass
    assert "s3cret" not in str(caught.value)


async def test_a_server_that_is_down_is_named_and_waited_for(byte_model: Path) -> None:
    fake, notes = made(byte_model), list[str]()
    async with opened(fake, byte_model, notes) as model:
        expected = await model.logprobs(SEQUENCES)
        fake.faults.status = 503
        scoring = asyncio.create_task(model.logprobs(SEQUENCES))
        while not notes:
            assert not scoring.done()
            await asyncio.sleep(0.01)
        fake.faults.status = 0
        for row, other in zip(await scoring, expected, strict=True):
            np.testing.assert_array_equal(row, other)
    assert len(notes) == 2, "once for all requests"
    assert notes[0].startswith("waiting for roles.t at http://127.0.0.1:")
    assert "503" in notes[0]
    assert notes[1].endswith("answers again")


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"status": 503}, r"roles.t at http://.* 503.* \(waited 0 s\)"),
        ({"status": 400}, "roles.t at http://.* refused the request"),
        ({"hang": True}, "roles.t at http://.* did not answer within 1 s"),
        ({"scores": False}, "prompt_logprobs is not supported"),
    ],
)
async def test_one_that_stays_away_ends_the_step(
    byte_model: Path, faults: dict[str, Any], reason: str
) -> None:
    fake = made(byte_model)
    async with opened(fake, byte_model, [], max_wait_s=0, timeout_s=1) as model:
        for name, value in faults.items():
            setattr(fake.faults, name, value)
        with pytest.raises(EngineError, match=reason):
            await model.logprobs(SEQUENCES)
