"""One loop, two engines: the embedded one and a service of Tinker's protocol give the same run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plain_sums import SUMS
from short_runs import curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from wire_setup import KEY, SDK_LEAVES_SOCKETS, Wire, wire_server

pytestmark = [SDK_LEAVES_SOCKETS, pytest.mark.xdist_group("engine backends")]


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with wire_server(TINY_MODEL, tmp_path_factory.mktemp("wire"), name="tiny-served") as made:
        yield made


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", KEY)


def config(folder: Path, engine: dict[str, Any]) -> RunConfig:
    training = {
        "steps": 10,
        "groups_per_step": 2,
        "group_size": 4,
        "learning_rate": 5e-4,
        "checkpoint_every": 5,
    }
    penalty = {"kl_penalty_coef": 0.1, "kl_reference_every": 4}
    return short_run(folder, seed=11, task=SUMS, engine=engine, training=training | penalty)


def episodes(folder: Path, step: int) -> list[tuple[Any, ...]]:
    """Reward, text and mean log probability of every episode of a step."""
    packed = folder / "rollouts" / f"step_{step:04d}.jsonl.gz"
    lines = gzip.decompress(packed.read_bytes()).splitlines()
    found = [json.loads(line) for line in lines]
    return sorted((e["reward"], e["sequences"][0]["text"], e["sequences"][0]["mean_logprob"]) for e in found)


async def test_both_engines_give_the_same_run(wire: Wire, tmp_path: Path) -> None:
    """Ten steps of a LoRA, from the same seed, with a KL reference that moves twice: the same samples, and
    losses and log probabilities to 1e-4."""
    ours, theirs = tmp_path / "embedded", tmp_path / "tinker"
    lora = {"rank": 8, "targets": ["attn", "mlp"]}
    await run_training(config(ours, {"lora": lora}), QuietReporter())
    service = {"backend": "tinker", "base_url": wire.url, "lora": lora}
    await run_training(config(theirs, service), QuietReporter())
    assert len(curve(ours)) == len(curve(theirs)) == 10
    assert any(line["groups/trained"] > 0 for line in curve(ours))
    for one, other in zip(curve(ours), curve(theirs), strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        for name in ("train/loss", "train/grad_norm", "train/kl_start", "train/sequences"):
            assert (name in one) == (name in other)
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-4, rel=1e-4), name
        assert max(line.get("alignment/max_abs_dlogp", 0) for line in (one, other)) < 1e-4
    for step in range(1, 11):
        for one, other in zip(episodes(ours, step), episodes(theirs, step), strict=True):
            assert one[:2] == other[:2]
            assert one[2] == pytest.approx(other[2], abs=1e-4)


async def test_a_service_that_cannot_be_used_is_refused_by_name(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = {"backend": "tinker", "base_url": wire.url}
    with pytest.raises(ConfigError, match=r"engine\.service_model: 'other' is not one of tiny-served"):
        await run_training(config(tmp_path / "a", service | {"service_model": "other"}), QuietReporter())
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match="needs the environment variable TINKER_API_KEY"):
        await run_training(config(tmp_path / "b", service), QuietReporter())
