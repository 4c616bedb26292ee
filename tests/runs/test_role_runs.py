"""A run whose episodes play against a frozen role: who sampled what, and what trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from interchange_helpers import until
from run_ledger import results
from short_runs import short_run
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page.episode_view import episode_view
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.testing import QuietReporter
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
    config = short_run(
        tmp_path / "run",
        networked=True,
        interchange_server={"processes": 2},
        task={"train_args": {"split": "train"}},
        roles={"rival": {"kind": "frozen"}},
        training={"steps": 3, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.01},
        workers={"script": str(tmp_path / "play.py")},
    )
    folder = await run_training(config, QuietReporter())
    accepted = results(folder.path)
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
    view = episode_view("run", LedgerReader(folder.path), accepted[0].episode_uuid)
    assert [(turn.role, turn.sequence is None) for turn in view.turns] == [
        ("", False),
        ("rival", True),
        ("", False),
    ]
    assert view.line.calls == 2


JUDGED = """
import asyncio, pathlib

async def rollout(episode):
    here = pathlib.Path(__file__).parent
    (here / "begun").touch()
    while not (here / "go").exists():
        await asyncio.sleep(0.02)
    return 1.0
"""
KEYS = {
    "JUDGE_KEY": "sk-of-the-judge-51c2",
    "TEAM_TOKEN": "tok-of-the-team-9e10-long",
    CLIENT_TOKEN: "tok-of-clients-0d3a-long",
    ADMIN_TOKEN: "tok-of-the-admin-44fe-long",
}


async def test_each_process_of_a_run_gets_the_keys_that_it_needs_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "judged.py").write_text(JUDGED, encoding="utf-8")
    config = short_run(
        tmp_path / "run",
        networked=True,
        interchange_server={"processes": 2, "clients": [{"name": "team", "token_env": "TEAM_TOKEN"}]},
        roles={
            "judge": {
                "kind": "outside",
                "base_url": "http://127.0.0.1:9/v1",
                "model": "m",
                "api_key_env": "JUDGE_KEY",
            }
        },
        training={"steps": 1, "groups_per_step": 1, "group_size": 2, "learning_rate": 0.01},
        workers={"script": str(tmp_path / "judged.py")},
    )
    pages: list[str] = []
    running = asyncio.create_task(run_training(config, QuietReporter(), on_page=pages.append))
    await asyncio.wait(
        {running, asyncio.ensure_future(until((tmp_path / "begun").exists, "an episode"))},
        return_when=asyncio.FIRST_COMPLETED,
    )
    async with httpx.AsyncClient(base_url=pages[0], timeout=60) as http:
        assert (await http.get("/", follow_redirects=True)).status_code in (200, 401, 403)
    children = psutil.Process().children(recursive=True)
    # Others, as the git that Inspect asks for the revision, come and go.
    ours = [child for child in children if " -m tinkerscript " in " ".join(child.cmdline())]
    seen = {" ".join(child.cmdline()): child.environ().values() for child in ours}
    (tmp_path / "go").touch()
    await running
    for part, keys in {
        " server --run-dir": set(KEYS),
        " gateway --number=1": {"JUDGE_KEY"},
        " gateway --number=2": {"JUDGE_KEY"},
        " worker ": {CLIENT_TOKEN},
        " view ": {ADMIN_TOKEN},
    }.items():
        (environ,) = [environ for command, environ in seen.items() if part in command]
        assert {name for name, value in KEYS.items() if value in environ} == keys, part
    assert len(seen) == 5, list(seen)
    assert not [command for command in seen for key in KEYS.values() if key in command]
