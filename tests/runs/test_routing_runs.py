"""Runs of a mixture in bfloat16: with the sampler's experts, the trainer agrees with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tinkerscript.engine
from plain_sums import SUMS
from short_runs import curve, short_run
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

TINY = Path(tinkerscript.engine.__file__).parent / "tiny"
LAYERS, CHOSEN = 8, 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer, and so many and large experts that rounding changes logprobs."""
    folder = tmp_path_factory.mktemp("mixture")
    tiny = json.loads((TINY / "config.json").read_text())
    kept = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{name: tiny[name] for name in kept},
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=32,
        num_experts=255,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        weight.data *= 1 if weight.dim() == 1 else 40 if "experts" in name else 2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


async def trained(folder: Path, model: Path, *, replays: bool, **engine: Any) -> dict[str, Any]:
    settings = {"model": str(model), "dtype": "bfloat16", "routing_replay": replays, **engine}
    training = {"steps": 1, "groups_per_step": 4, "group_size": 4, "on_misalignment": "warn"}
    training |= {"kl_penalty_coef": 0.05, "learning_rate": 1e-4}  # All train, whatever their rewards.
    config = short_run(folder, task=SUMS, engine=settings, training=training)
    await run_training(config, QuietReporter())
    return json.loads((folder / "alignment.json").read_text())


@pytest.mark.parametrize("lora", [pytest.param({}, marks=pytest.mark.long), {"rank": 4}])
async def test_the_gap_falls_at_least_tenfold(mixture: Path, tmp_path: Path, lora: dict[str, Any]) -> None:
    own, replayed = [
        await trained(tmp_path / str(replays), mixture, replays=replays, lora=lora)
        for replays in (False, True)
    ]
    assert own["mean_abs_dlogp"] > 10 * replayed["mean_abs_dlogp"] > 0
    assert all(step["train/grad_norm"] > 0 for step in curve(tmp_path / "True"))
    for replays in (False, True):
        calls = [
            call
            for group in recorded_groups(tmp_path / str(replays))
            for episode in group.episodes
            for call in episode.calls
        ]
        assert len(calls) == 16
        assert {len(call.experts) for call in calls} == {
            replays * LAYERS * CHOSEN * call.new_tokens for call in calls
        }
