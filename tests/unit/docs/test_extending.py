"""docs/extending.md: each example runs, and changes what it says it changes."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import yaml

from gateway_bench import Bench
from tinkerscript.config import EngineConfig, RunConfig
from tinkerscript.engine.training import AllWeights, Trainer
from tinkerscript.engine.weights import load_model
from tinkerscript.gateway import named_model
from tinkerscript.gateway.dialects import DIALECTS
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.sampler import SampleRequest
from tinkerscript.train import backends
from tinkerscript.train.policy_loss import check_loss
from tinkerscript.train.step_metrics import extra_metrics
from tinkerscript.workers.base_task import EpisodeModel, load_task

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES: Mapping[str, str] = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.DOTALL))
SETTINGS: list[dict[str, Any]] = [
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, as the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_with(section: str) -> RunConfig:
    """A config with the page's settings of that section."""
    (values,) = [each for each in SETTINGS if section in each]
    return RunConfig.model_validate(values)


@pytest.mark.usefixtures("folder")
def test_a_loss(random_model: Path) -> None:
    training = config_with("training").training
    check_loss(config_with("training"))
    inputs = {
        "target_tokens": np.array([3, 4]),
        "logprobs": np.full(2, -1.0, np.float32),
        "advantages": np.array([1.0, 0.0], np.float32),
    }
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([2, 3]),
        loss_fn_inputs={key: tinker.TensorData.from_numpy(value) for key, value in inputs.items()},
    )
    output = Trainer(AllWeights(load_model(random_model))).forward_backward(
        [datum], training.loss_fn, dict(training.loss_config), backward=False
    )
    logprobs = torch.tensor(output.loss_fn_outputs[0]["logprobs"].data)
    expected = -(torch.tensor([1.01, 0.0]) * logprobs).sum().item()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("folder")
def test_a_metric() -> None:
    (metric,) = extra_metrics(config_with("metrics"))
    right, wrong = (EpisodeRollouts(name, reward, (), ()) for name, reward in (("a", 1.0), ("b", 0.0)))
    groups = [RolloutGroup("g", (right, wrong)), RolloutGroup("h", (wrong, wrong))]

    facts: Any = SimpleNamespace(groups=groups)
    assert metric(facts) == {"mine/solved": 0.5}


async def test_a_wire_format(folder: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = runpy.run_path("plain_text.py")["PlainText"]
    monkeypatch.setattr(named_model, "DIALECTS", (*DIALECTS, dialect))
    bench = Bench(byte_model)
    response = await bench.client.post("/v1/plain", content=b"hi")
    assert response.json() == {"text": "hello"}
    assert len(bench.claims.recorded) == 1
    assert bench.app.openapi()["paths"]["/v1/plain"]["post"]["description"] == dialect.__doc__


async def test_a_training_backend(folder: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_of_the_page = runpy.run_path("announcing.py")["AnnouncingBackend"]
    monkeypatch.setitem(backends.BACKENDS, "announcing", lambda: backend_of_the_page)
    notes: list[str] = []
    config = EngineConfig(backend="announcing", model=str(random_model))
    opened = backends.open_backend(
        config, random_model, checkpoint_dir=folder, seed=1, restore=None, note=notes.append
    )
    async with opened as backend:
        sampler = await backend.publish(7)
        request = SampleRequest(prompt=pack_ids([2, 3]), num_samples=1, max_tokens=2, temperature=1.0, seed=1)
        result = await sampler.sample(request)
    assert notes == ["publishing policy version 7"]
    assert result.policy_version == 7


class Walker:
    """A chat endpoint that goes right and down in turn, whatever it is shown."""

    async def complete(self, base_url: str, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
        assert (base_url, api_key, body["model"]) == ("http://lake/v1", "key", "policy")
        move = ("right", "down")[len(body["messages"]) // 2 % 2]
        return {"choices": [{"message": {"role": "assistant", "content": move}}]}


async def test_a_gymnasium_environment_is_a_task(folder: Path) -> None:
    task = load_task(config_with("task").task.name, {})
    assert task.task_id == "frozen_lake.py:FrozenLake"
    samples = task.samples(held_out=False)
    assert not {sample["id"] for sample in samples} & {s["id"] for s in task.samples(held_out=True)}
    walker: Any = Walker()
    model = EpisodeModel(base_url="http://lake/v1", api_key="key", endpoint=walker)
    outputs = [await task.rollout(sample, model) for sample in samples[:30]]
    assert {output.reward for output in outputs} == {0.0, 1.0}
    for output in outputs:
        assert output.metadata["scores"] == {"crossed": output.reward}
        assert (output.log_metrics["moves"] == 6) == (output.reward == 1.0)


def test_every_example_is_run_here() -> None:
    names = ("frozen_lake.py", "my_losses.py", "my_metrics.py", "plain_text.py", "announcing.py")
    assert tuple(FILES) == names
