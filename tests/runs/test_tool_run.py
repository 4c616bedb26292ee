"""A run of many turns and tools: what trains is what was sampled, each token with its own log probability."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tinker

import tool_agent
from plain_sums import SUMS
from run_ledger import results
from short_runs import curve, short_run
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.rollouts.call import full_prompts, unpack_ids
from tinkerscript.testing import QuietReporter
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.run import run_training
from tinkerscript.trainer_link.messages import EpisodeAccepted
from tool_model import teach_tools


async def test_every_token_of_a_run_with_many_turns_and_tools_is_what_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = await teach_tools(tmp_path / "taught")
    config = short_run(
        "run",
        task=SUMS,
        engine={"model": str(model)},
        training={"steps": 2, "groups_per_step": 2, "group_size": 4},
        workers={"concurrency": 16, "script": tool_agent.__file__},
    )
    folder = await run_training(config, QuietReporter())
    accepted = results(folder.path)
    calls = [call for e in accepted for call in e.calls]
    tools = Counter(
        made["function"]["name"] for call in calls for made in json.loads(call.reply).get("tool_calls", [])
    )
    assert len(accepted) == 16
    assert len(calls) >= 4 * len(accepted), "several calls an episode"
    assert min(tools["lookup_price"], tools["calculator"]) >= len(accepted) // 2, tools

    assert {call.tokenizer for call in calls} == {LightTokenizer(model).fingerprint}

    # The report: every sampled token was compared, and none differs.
    report = json.loads((folder.path / "alignment.json").read_text())
    sampled = sum(len(call.sampled_ids) for call in calls)
    assert report["tokens_sampled"] == report["gaps"]["0"]["tokens"] == report["tokens_trained"] == sampled
    assert report["max_abs_dlogp"] <= 1e-4
    assert (report["errors"], report["findings"]) == ({}, [])
    assert "tokenizer_differs" not in report["warnings"]
    assert report["merge_ratio"] > 3
    assert all(line["alignment/max_abs_dlogp"] <= 1e-4 for line in curve(folder.path))
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["alignment"][0].startswith("clean: every sequence")

    # And without the report: the first weights score what they sampled.
    assert 0 < await worst_gap(model, [e for e in accepted if e.policy_versions == {0}]) <= 1e-4


async def worst_gap(model: Path, episodes: list[EpisodeAccepted]) -> float:
    """Largest difference between recorded log probabilities and those of the whole prompts under `model`."""
    worst = 0.0
    with EmbeddedEngine(model, checkpoint_dir=model / "none") as engine:
        client = await engine.create_sampling_client()
        for episode in episodes:
            prompts = full_prompts(episode.calls)
            for call in episode.calls:
                ids = [*unpack_ids(prompts[call.call_id]).tolist(), *call.sampled_ids.tolist()]
                scored = await client.compute_logprobs(tinker.ModelInput.from_ints(ids))
                ours = np.array(scored[-len(call.sampled_ids) :], np.float32)
                worst = max(worst, float(np.abs(ours - call.sampled_logprobs).max()))
    return worst
