"""`make real` in short: a published model is fetched, trains two steps, and is what the ledger says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from command_line import ROOT, as_options, start, summary
from run_ledger import ask, results, standing_steps
from tinkerscript.tokenizer import LightTokenizer

EXAMPLE = ROOT / "examples" / "smollm2"
SHORT: dict[str, Any] = {
    "task.name": f"{EXAMPLE / 'tasks.py'}@formats",
    "experiment_dir": "run",
    "engine.threads": 1,  # Two would wait for each other beside the other tests.
    "interchange_server.interchange_server_port": 0,
    "sampling.max_tokens": 16,
    "training.steps": 2,
    "training.groups_per_step": 1,
    "training.group_size": 5,
    "evaluation.episodes": 0,
    "evaluation.every_steps": 0,
}


@pytest.mark.timeout(600)
def test_two_steps_change_the_weights_and_each_reward_is_that_of_the_recorded_tokens(
    smollm2: Path, tmp_path: Path
) -> None:
    settings = {**SHORT, "engine.model": smollm2}
    command = start(tmp_path, "train", str(EXAMPLE / "sums.yaml"), *as_options(settings))
    assert command.wait(seconds=570) == 0, command.text()
    result = summary(tmp_path)
    assert (result["episodes_lost"], result["episodes_failed"], result["train_episodes"]) == (0, 0, 10)
    assert result["max_abs_dlogp"] <= 1e-4
    run = tmp_path / "run"
    assert standing_steps(run) == [1, 2]
    trained = ask(run, "SELECT count(DISTINCT episode) FROM trained WHERE outcome = 'trained'")
    assert trained[0][0] >= 5, "no group had rewards that differ"

    forms = runpy.run_path(str(EXAMPLE / "tasks.py"))["FORMS"]
    asked = dict(
        ask(
            run,
            "SELECT uuid, json_extract(payload, '$.sample.target') "
            "FROM episodes JOIN samples ON samples.digest = episodes.sample",
        )
    )
    tokenizer = LightTokenizer(smollm2)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for episode in results(run):
        (call,) = episode.all_calls
        ids = call.sampled_ids.tolist()
        ended = ids[-1] == end
        reply = tokenizer.decode(ids[:-1] if ended else ids)
        _, is_of_form = forms[asked[episode.episode_uuid]]
        assert episode.reward == float(ended and bool(reply.strip()) and is_of_form(reply)), reply
