"""A run whose episodes play against a frozen role: who sampled what, and what trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tinkerscript.config import RunConfig
from tinkerscript.page.episode_view import episode_view
from tinkerscript.record.reader import Record
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.testing import QuietReporter
from tinkerscript.train.journal import EpisodeAccepted, read_journal
from tinkerscript.train.run import run_training

SCRIPT = """
import httpx

async def rollout(episode):
    async def ask(role, text):
        model = episode.model(role)
        async with httpx.AsyncClient(timeout=60) as http:
            reply = await http.post(
                f"{model.base_url}/chat/completions",
                json={"model": model.name, "messages": [{"role": "user", "content": text}], "max_tokens": 6},
                headers={"Authorization": f"Bearer {model.api_key}"},
            )
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]["content"]

    question = str(episode.payload["sample"]["input"])
    ours = await ask("policy", question)
    theirs = await ask("rival", "12+34=")
    await ask("policy", question + ours)
    return float(len(set(ours))) + len(theirs) / 100
"""


async def test_a_frozen_role_samples_the_same_weights_in_every_step_and_never_trains(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(SCRIPT, encoding="utf-8")
    arithmetic = Path(__file__).parents[2] / "examples" / "arithmetic.py"
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "run"),
            "interchange_server": {"interchange_server_port": 0, "processes": 2},
            "task": {"name": f"{arithmetic}@arithmetic", "train_args": {"split": "train"}},
            "roles": {"rival": {"kind": "frozen"}},
            "training": {"steps": 3, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.01},
            "evaluation": {"episodes": 0},
            "workers": {"count": 1, "concurrency": 4, "script": str(tmp_path / "play.py")},
        }
    )
    folder = await run_training(config, QuietReporter())
    accepted = [e for e in read_journal(folder.path / "journal.jsonl") if isinstance(e, EpisodeAccepted)]
    assert len(accepted) == 12
    for episode in accepted:
        assert [call.role for call in episode.all_calls] == ["", "rival", ""]
        assert [call.role for call in episode.calls] == ["", ""]
        rival = episode.all_calls[1]
        assert len(unpack_ids(rival.sampled)) == len(rival.sampled_logprobs) > 0
        assert rival.policy_version < 0
    # Frozen weights have one distribution for one prompt, whatever the policy's version was.
    versions = {call.policy_version for episode in accepted for call in episode.calls}
    assert len(versions) == 3
    (prompt,) = {episode.all_calls[1].new_prompt for episode in accepted}
    assert prompt
    first = [
        (int(call.sampled_ids[0]), float(call.sampled_logprobs[0]))
        for call in (e.all_calls[1] for e in accepted)
    ]
    known = dict(first)
    assert len(known) < len(first)
    assert all(np.isclose(known[token], logprob, atol=1e-4) for token, logprob in first)
    record = Record(folder.path)
    view = episode_view("run", record, accepted[0].episode_uuid)
    assert [(turn.role, turn.sequence is None) for turn in view.turns] == [
        ("", False),
        ("rival", True),
        ("", False),
    ]
    assert view.line.calls == 2
