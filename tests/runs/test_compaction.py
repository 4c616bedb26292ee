"""A run whose agent rewrites its history: it asks for a summary, and goes on with that alone."""

from __future__ import annotations

import json
from pathlib import Path

from run_ledger import results
from short_runs import short_run
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from tinkerscript.train.run_folder import ALIGNMENT_FILE

COMPACTS = """
import httpx

async def rollout(episode):
    model, said = episode.model(), ""
    async with httpx.AsyncClient(timeout=60) as http:
        async def ask(messages):
            reply = await http.post(
                f"{model.base_url}/chat/completions",
                json={"model": model.name, "messages": messages, "max_tokens": 6},
                headers={"Authorization": f"Bearer {model.api_key}"},
            )
            assert reply.status_code == 200, reply.text
            answer = reply.json()["choices"][0]["message"]
            return [*messages, {"role": "assistant", "content": answer["content"]}]

        system = {"role": "system", "content": "Add."}
        messages = [system]
        for turn in ("1+1=", "2+2=", "Summarize."):
            messages = await ask([*messages, {"role": "user", "content": turn}])
        summary = {"role": "user", "content": "So far: " + messages[-1]["content"]}
        messages = await ask([system, summary])
        messages = await ask([*messages, {"role": "user", "content": "3+3="}])
    return float(len(set(messages[-1]["content"])))
"""


async def test_a_compaction_is_reported_and_each_token_trains_once(tmp_path: Path) -> None:
    (tmp_path / "compacts.py").write_text(COMPACTS, encoding="utf-8")
    config = short_run(
        tmp_path / "run",
        networked=True,
        task={"train_args": {"split": "train"}},
        training={"steps": 1, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.001},
        workers={"script": str(tmp_path / "compacts.py")},
    )
    folder = await run_training(config, QuietReporter())
    report = json.loads((folder.path / ALIGNMENT_FILE).read_text())
    assert report["forks"] == {"new_conversation": 4}
    assert report["errors"] == {}
    for episode in results(folder.path):
        before, after = merge_calls(episode.calls, episode_uuid=episode.episode_uuid)
        assert [len(each.segments) for each in (before, after)] == [3, 2]
        trained = [segment.call.call_id for each in (before, after) for segment in each.segments]
        assert sorted(trained) == sorted(call.call_id for call in episode.calls)
