"""A teacher at a vLLM server: what it scores, and what a run learns from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_server import running_vllm

from short_runs import curve, short_run
from taught_model import taught_sums
from tinkerscript.config import RoleConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampleRequest
from tinkerscript.testing import QuietReporter
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.frozen_model import open_frozen_role
from tinkerscript.train.run import run_training

TRAINING: dict[str, Any] = {
    **{"steps": 6, "groups_per_step": 64, "group_size": 1, "learning_rate": 5e-4},
    **{"loss_fn": "importance_sampling", "distillation": {"teacher": "teacher"}},
}


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_student_learns_the_same_through_vllm_and_through_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taught = await asyncio.to_thread(taught_sums, tmp_path / "teacher")
    with running_vllm(tmp_path, tmp_path / "adapters", model=taught) as server:
        await asyncio.to_thread(server.wait)
        await scores_what_the_engine_scores(server.url, taught, tmp_path)
        for name, role in (("served", {"base_url": server.url}), ("beside", {"model": str(taught)})):
            roles = {"teacher": {"kind": "frozen", **role}}
            config = short_run(
                tmp_path / name, seed=5, sampling={"max_tokens": 8}, roles=roles, training=TRAINING
            )
            await run_training(config, QuietReporter())
    served, beside = curve(tmp_path / "served"), curve(tmp_path / "beside")
    kl = [line["distillation/teacher_kl"] for line in served]
    print([round(value, 3) for value in kl])
    assert np.mean(kl[-2:]) < 0.7 * kl[0]
    assert kl[0] == pytest.approx(beside[0]["distillation/teacher_kl"], abs=1e-3)
    assert [line["train/sequences"] for line in served] == [64] * 6


async def scores_what_the_engine_scores(url: str, taught: Path, folder: Path) -> None:
    random, role = np.random.default_rng(1), RoleConfig(kind="frozen", base_url=url)
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=folder) as engine:
        backend = EmbeddedBackend(engine)
        beside = await backend.open_frozen(str(taught))
        sequences = [random.integers(0, engine.vocabulary, n).astype(np.int32) for n in (1, 2, 30, 200)]
        opening = open_frozen_role("t", role, backend, folder=TINY_MODEL, note=print, timeout_s=60)
        async with opening as served:
            pairs = zip(await served.logprobs(sequences), await beside.logprobs(sequences), strict=True)
            for one, other in pairs:
                np.testing.assert_allclose(one, other, atol=2e-3)
            prompt = SampleRequest(prompt=pack_ids(sequences[2].tolist()), max_tokens=8)
            (sampled,) = (await served.sampler.sample(prompt)).sequences
            ids = unpack_ids(sampled.sampled)
            (row,) = await beside.logprobs([np.concatenate([sequences[2], ids]).astype(np.int32)])
            np.testing.assert_allclose(unpack_logprobs(sampled.logprobs), row[-len(ids) :], atol=2e-3)
