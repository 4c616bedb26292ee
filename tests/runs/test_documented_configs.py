"""Every config of the docs and of examples/ trains a step on a model with real-sized logits.

What a config asks of a large model on GPUs is computed here by a small random one of the same family on the
CPU: in the config's precision, with its adapter, at its learning rate.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import yaml
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from real_sized import real_sized
from tinkerscript.config import RunConfig
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.defaults import resolved

ROOT = Path(__file__).parents[2]
QWEN3 = {
    "vocab_size": 768,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 761,
}
FAMILIES = {
    r"Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(
        **QWEN3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    r"tiny|Qwen/Qwen3-.*": Qwen3Config(**QWEN3),
    r"models/.*|/models/.*": Qwen3Config(**QWEN3),
    r".*/SmolLM2-.*": LlamaConfig(**QWEN3),
}
"""Names of models in the docs -> a small config of their family. A folder there may be any."""

LARGEST_LOGIT = 30.0

STEP_SETTINGS = ("learning_rate", "max_mean_dlogp")


def configs() -> Iterator[Any]:
    """Each file, and each YAML block of the docs, that is a run's config; once for all that want the same."""
    texts = [
        (str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob("examples/**/*.yaml"))
    ]
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        blocks = re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.S | re.M)
        texts += [(f"{path.relative_to(ROOT)} {number}", text) for number, text in enumerate(blocks, 1)]
    seen: list[Any] = []
    for name, text in texts:
        content = next(yaml.safe_load_all(text))
        if not isinstance(content, dict) or not content.keys() <= RunConfig.model_fields.keys():
            continue
        training = content.get("training") or {}
        wanted = {
            "engine": content.get("engine"),
            "training": {
                key: training[key] for key in ("learning_rate", "max_mean_dlogp") if key in training
            },
        }
        if any(wanted.values()) and wanted not in seen:
            seen.append(wanted)
            yield pytest.param(wanted, id=name)


CONFIGS = list(configs())


def test_the_configs_are_found() -> None:
    names = {str(each.id).partition(" ")[0] for each in CONFIGS}
    assert names >= {*(f"examples/scale/{name}.yaml" for name in ("laptop", "one_gpu", "one_node"))}
    assert names >= {"docs/models.md", "docs/vllm.md", "docs/devices.md", "docs/training.md"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for number, (names, config) in enumerate(FAMILIES.items()):
        folders[names] = folder = tmp_path_factory.mktemp(f"family{number}")
        shutil.copytree(
            TINY_MODEL, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
        )
        real_sized(config, LARGEST_LOGIT).save_pretrained(folder)
    return folders


@pytest.mark.parametrize("content", CONFIGS)
async def test_a_config_trains_a_step(
    content: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    config = RunConfig.model_validate({key: value for key, value in content.items() if value})
    families = [folder for names, folder in models.items() if re.fullmatch(names, config.engine.model)]
    assert families, f"{config.engine.model}: name its family in FAMILIES"
    engine = config.engine.model_copy(
        update={
            "model": str(families[0]),
            "device": "cpu",
            "devices": 1,
            "backend": "embedded",
            "checkpoint": "",
        }
    )
    notes: list[str] = []
    async with EmbeddedBackend.open(
        engine, families[0], checkpoint_dir=tmp_path / "checkpoints", seed=0, note=notes.append
    ) as backend:
        assert notes == []
        await backend.start()
        client: EmbeddedSamplingClient = await backend.client.save_weights_and_get_sampling_client()
        prompt = np.random.default_rng(0).integers(0, 700, 24).tolist()
        params = tinker.SamplingParams(max_tokens=16, seed=1, stop=[])
        sampled = (await client.sample_async(tinker.ModelInput.from_ints(prompt), 4, params)).sequences
        data = [
            datum(prompt, each, advantage) for each, advantage in zip(sampled, (1, -1, 1, -1), strict=True)
        ]
        before = (await backend.client.forward_backward(data, "importance_sampling")).loss_fn_outputs
        gaps = [
            np.abs(output["logprobs"].to_numpy()[-16:] - np.array(each.logprobs))
            for output, each in zip(before, sampled, strict=True)
        ]
        assert np.mean(gaps) <= config.training.max_mean_dlogp
        assert config.engine.dtype != "float32" or np.max(gaps) < 1e-3
        chosen, _ = resolved(config.model_copy(update={"engine": engine}), families[0])
        await backend.client.optim_step(tinker.AdamParams(learning_rate=chosen.training.learning_rate))
        after = (await backend.client.forward(data, "importance_sampling")).loss_fn_outputs
        assert any(
            (one["logprobs"].to_numpy() != other["logprobs"].to_numpy()).any()
            for one, other in zip(before, after, strict=True)
        )


def datum(prompt: list[int], sampled: Any, advantage: float) -> tinker.Datum:
    zeros = np.zeros(len(prompt) - 1, np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *sampled.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": np.array([*prompt[1:], *sampled.tokens]),
            "logprobs": np.concatenate([zeros, np.array(sampled.logprobs, np.float32)]),
            "advantages": np.concatenate([zeros, np.full(16, advantage, np.float32)]),
        },
    )
