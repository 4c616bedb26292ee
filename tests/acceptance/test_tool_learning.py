"""The tiny model learns to use a tool, as `tinkerscript train examples/secret_sums.yaml` does, in short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import list_eval_logs, read_eval_log_async

from command_line import ROOT, as_options, metrics_lines, start, summary

SHORT: dict[str, Any] = {
    "task.name": f"{ROOT / 'examples' / 'secret_sums.py'}@secret_sums",
    "experiment_dir": "run",
    "interchange_server.interchange_server_port": 0,
    "training.steps": 5,
    "training.inspect_log_every": 5,
    "evaluation.episodes": 100,
    "evaluation.every_steps": 0,
}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_tool_is_learnt_in_one_sequence_an_episode_and_inspect_shows_it(tmp_path: Path) -> None:
    command = start(tmp_path, "train", str(ROOT / "examples" / "secret_sums.yaml"), *as_options(SHORT))
    assert command.wait(seconds=540) == 0, command.text()
    result = summary(tmp_path)
    assert result["eval_before"] < 0.35
    assert result["eval_after"] > result["eval_before"] + 0.25
    assert result["sequences_per_episode"] == 1.0
    assert (result["episodes_lost"], result["episodes_failed"]) == (0, 0)
    assert result["max_abs_dlogp"] <= 1e-4
    assert any("episode/score/exact" in line for line in metrics_lines(tmp_path))

    folder = tmp_path / "run" / "inspect"
    (info,) = (each for each in list_eval_logs(str(folder)) if "eval-" not in each.name)
    log = await read_eval_log_async(info)
    assert log.samples is not None
    assert len(log.samples) == 16 * 8
    right = next(sample for sample in log.samples if sample.metadata["rollout"]["reward"] == 1.0)
    assert [message.role for message in right.messages] == ["user", "assistant", "tool", "assistant"]
    assert right.scores is not None
    assert right.scores["exact"].value == 1.0
    prompts, sampled = (right.metadata["rollout"][key] for key in ("prompt_ids", "sampled_ids"))
    assert prompts[1][: len(prompts[0]) + len(sampled[0])] == prompts[0] + sampled[0]
