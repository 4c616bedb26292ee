"""Models beside the one that trains: they score and sample, do not change, and share what they can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from other_models import write_model
from small_models import sft_datum
from tinkerscript.config import EngineConfig, RoleConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import ConfigError, EngineError, EngineRequestError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import FloatArray, IntArray, pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampleRequest
from tinkerscript.train.backends import open_backend
from tinkerscript.train.backends.backend import FrozenModel, TrainerBackend
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.frozen_model import open_frozen_role
from wire_setup import KEY, SDK_LEAVES_SOCKETS, Wire, wire_server

pytestmark = SDK_LEAVES_SOCKETS

SEQUENCES = [np.array(ids, np.int32) for ids in ([5, 9, 33, 2, 8], [5, 9, 33, 7], [4, 4], [11])]
LORA = LoraSettings(4, targets=("attn", "mlp"), seed=3)


def expected(folder: Path) -> list[FloatArray]:
    """Hugging Face's own forward pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    rows = []
    for ids in SEQUENCES:
        tokens = torch.tensor(ids[None].astype(np.int64))
        with torch.no_grad():
            every = torch.log_softmax(model(tokens).logits[0].float(), -1)
        own = every[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        rows.append(np.append(np.float32(0), own).astype(np.float32))
    return rows


def same(one: list[FloatArray], other: list[FloatArray], *, atol: float = 1e-5) -> bool:
    return all(a.shape == b.shape and np.allclose(a, b, atol=atol) for a, b in zip(one, other, strict=True))


async def trained(backend: Any) -> None:
    """Change the weights a lot."""
    for _ in range(3):
        await backend.client.forward_backward([sft_datum([5, 9, 33, 2])], "cross_entropy")
        await backend.client.optim_step(tinker.AdamParams(learning_rate=0.02))


async def now(backend: EmbeddedBackend) -> FloatArray:
    """Of the first sequence, under the weights that train."""
    client = await backend.engine.create_sampling_client()
    _, *row = await client.compute_logprobs(tinker.ModelInput.from_ints(SEQUENCES[0].tolist()))
    return np.array([0, *row], np.float32)


async def first_token(model: FrozenModel, prompt: IntArray) -> tuple[int, float]:
    request = SampleRequest(prompt=pack_ids(prompt.tolist()), max_tokens=1, seed=4)
    result = await model.sampler.sample(request)
    assert result.policy_version == -1, "what it samples does not train"
    return int(unpack_ids(result.sequences[0].sampled)[0]), float(
        unpack_logprobs(result.sequences[0].logprobs)[0]
    )


@pytest.fixture(params=[None, LORA], ids=["all weights", "lora"])
def backend(request: pytest.FixtureRequest, random_model: Path, tmp_path: Path) -> Iterator[EmbeddedBackend]:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, seed=3, lora=request.param) as engine:
        yield EmbeddedBackend(engine)


async def test_the_start_stays_what_it_was_while_the_run_trains(
    backend: EmbeddedBackend, random_model: Path
) -> None:
    frozen = await backend.open_frozen("")
    before = await frozen.logprobs(SEQUENCES)
    assert same(before, expected(random_model))
    assert [row[0] for row in before] == [0, 0, 0, 0]
    token, logprob = await first_token(frozen, SEQUENCES[0])
    await trained(backend)
    assert same(await frozen.logprobs(SEQUENCES), before, atol=0)
    assert await first_token(frozen, SEQUENCES[0]) == (token, logprob)
    following = np.append(SEQUENCES[0], np.int32(token))
    assert (await frozen.logprobs([following]))[0][-1] == pytest.approx(logprob, abs=1e-5)
    assert not np.allclose(await now(backend), before[0], atol=1e-3), "the run's own weights did change"


async def test_checkpoints_score_as_they_were_saved_and_the_reference_of_a_divergence_moves(
    backend: EmbeddedBackend,
) -> None:
    start = await backend.start_logprobs(SEQUENCES)
    for name in ("one", "two"):
        await trained(backend)
        saved = await now(backend)
        folder = (await backend.client.save_state(name)).path
        await trained(backend)
        await backend.renew_start(Path(folder))
        found = await backend.start_logprobs(SEQUENCES)
        assert np.allclose(found[0], saved, atol=1e-5)
        assert not same(found, start, atol=1e-3)
        frozen = await backend.open_frozen(folder)
        assert same(await frozen.logprobs(SEQUENCES), found)
        assert str(frozen.folder) == folder
        begun_there = EmbeddedBackend(backend.engine, folder)
        assert same(await begun_there.start_logprobs(SEQUENCES), found)
    assert same(await (await backend.open_frozen("")).logprobs(SEQUENCES), start), "roles keep the start"


async def test_a_model_of_another_kind_has_its_own_limits(backend: EmbeddedBackend, tmp_path: Path) -> None:
    other = write_model("llama3.2", tmp_path / "other")
    frozen = await backend.open_frozen(str(other))
    assert frozen.max_context != backend.max_context
    assert same(await frozen.logprobs(SEQUENCES), expected(other))
    await first_token(frozen, SEQUENCES[0])
    with pytest.raises(EngineRequestError, match="ids outside"):
        await frozen.logprobs([np.array([1, 10**6], np.int32)])


@pytest.mark.parametrize(
    ("model", "reason"), [("nowhere/to/be/found", "does not exist"), ("folder", "has no config.json")]
)
async def test_a_role_without_a_model_is_named(
    backend: EmbeddedBackend, tmp_path: Path, model: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    name = str(tmp_path / model)
    with pytest.raises(ConfigError, match=rf"roles.teacher.model: '{name}'.*{reason}"):
        await opened(RoleConfig(kind="frozen", model=name), backend)


async def opened(role: RoleConfig, backend: EmbeddedBackend) -> None:
    async with open_frozen_role(
        "teacher", role, backend, folder=TINY_MODEL, note=lambda _: None, timeout_s=60
    ):
        pass


# A service


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with wire_server(TINY_MODEL, tmp_path_factory.mktemp("wire"), name="tiny-served") as made:
        yield made


@pytest.fixture
async def service(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TrainerBackend]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    config = EngineConfig(backend="tinker", base_url=wire.url)
    opening = open_backend(
        config, TINY_MODEL, checkpoint_dir=tmp_path, seed=1, restore=None, note=lambda _: None
    )
    async with opening as backend:
        yield backend


async def test_a_service_has_the_start_checkpoints_and_base_models(
    service: TrainerBackend, tmp_path: Path
) -> None:
    start = await service.open_frozen("")
    assert same(await start.logprobs(SEQUENCES[:3]), expected(TINY_MODEL)[:3], atol=1e-4)
    assert start.folder == TINY_MODEL
    base = await service.open_frozen("tiny-served")
    assert same(await base.logprobs(SEQUENCES[:3]), await start.logprobs(SEQUENCES[:3]))
    await trained(service)
    saved = await service.client.save_state("teacher")
    by_folder = await service.open_frozen(str(tmp_path / "teacher"))
    by_path = await service.open_frozen(saved.path)
    scores = await by_folder.logprobs(SEQUENCES[:3])
    assert same(scores, await by_path.logprobs(SEQUENCES[:3]))
    assert not same(scores, await start.logprobs(SEQUENCES[:3]), atol=1e-3)
    await trained(service)
    assert same(scores, await by_folder.logprobs(SEQUENCES[:3])), "its weights never change"
    await first_token(by_path, SEQUENCES[0])
    with pytest.raises((ConfigError, EngineError), match="no-such-model"):
        await service.open_frozen("no-such-model")


async def test_a_service_trains_two_policies(service: TrainerBackend, tmp_path: Path) -> None:
    async def logprobs(backend: TrainerBackend) -> FloatArray:
        output = await backend.client.forward([sft_datum([5, 9, 33, 2])], "cross_entropy")
        return output.loss_fn_outputs[0]["logprobs"].to_numpy()

    folder = tmp_path / "roles" / "rival"
    rival = await service.open_policy("rival", "", checkpoint_dir=folder, restore=None)
    before = await logprobs(service)
    await trained(rival)
    assert np.allclose(await logprobs(service), before, atol=1e-6)
    saved = await logprobs(rival)
    assert not np.allclose(saved, before, atol=1e-4)
    for each in (rival, service):
        await each.client.save_state("step_0001")
    again = await service.open_policy("rival", "", checkpoint_dir=folder, restore="step_0001")
    assert np.allclose(await logprobs(again), saved, atol=1e-5)
