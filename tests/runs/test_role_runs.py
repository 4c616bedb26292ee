"""A run whose episodes play against a frozen role: who sampled what, what trains, and who has which key."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from interchange_helpers import until
from plain_sums import SUMS
from run_ledger import results
from short_runs import short_run
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page.episode_view import episode_view
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

pytestmark = pytest.mark.xdist_group("roles")  # Both look at one run.

SCRIPT = """
import asyncio, pathlib

import httpx

HERE = pathlib.Path(__file__).parent

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

    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)
    question = str(episode.payload["sample"]["input"])
    ours = await ask("policy", question)
    theirs = await ask("rival", "12+34=")
    await ask("policy", question + ours)
    return float(len(set(ours))) + len(theirs) / 100
"""
KEYS = {
    "JUDGE_KEY": "sk-of-the-judge-51c2",
    "TEAM_TOKEN": "tok-of-the-team-9e10-long",
    CLIENT_TOKEN: "tok-of-clients-0d3a-long",
    ADMIN_TOKEN: "tok-of-the-admin-44fe-long",
}


@dataclass
class Played:
    """A finished run, and what its processes had while it went on."""

    run: Path
    environs: dict[str, set[str]]
    """Command line -> the values of the variables."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in KEYS.items():
            patch.setenv(name, value)
        return asyncio.run(play(folder))


async def play(folder: Path) -> Played:
    (folder / "play.py").write_text(SCRIPT, encoding="utf-8")
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    config = short_run(
        folder / "run",
        networked=True,
        interchange_server={"processes": 2, "clients": [{"name": "team", "token_env": "TEAM_TOKEN"}]},
        task=SUMS,
        roles={"rival": {"kind": "frozen"}, "judge": {"kind": "outside", **judge}},
        training={"steps": 3, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.01},
        workers={"script": str(folder / "play.py")},
    )
    pages: list[str] = []
    running = asyncio.create_task(run_training(config, QuietReporter(), on_page=pages.append))
    await asyncio.wait(
        {running, asyncio.ensure_future(until((folder / "begun").exists, "an episode"))},
        return_when=asyncio.FIRST_COMPLETED,
    )
    async with httpx.AsyncClient(base_url=pages[0], timeout=60) as http:
        assert (await http.get("/", follow_redirects=True)).status_code in (200, 401, 403)
    children = psutil.Process().children(recursive=True)
    # Others, as the git that Inspect asks for the revision, come and go.
    ours = [child for child in children if " -m tinkerscript " in " ".join(child.cmdline())]
    environs = {" ".join(child.cmdline()): set(child.environ().values()) for child in ours}
    (folder / "go").touch()
    await running
    return Played(folder / "run", environs)


def test_each_process_of_a_run_gets_the_keys_that_it_needs_and_no_other(played: Played) -> None:
    for part, keys in {
        " server --run-dir": set(KEYS),
        " gateway --number=1": {"JUDGE_KEY"},
        " gateway --number=2": {"JUDGE_KEY"},
        " worker ": {CLIENT_TOKEN},
        " view ": {ADMIN_TOKEN},
    }.items():
        (environ,) = [environ for command, environ in played.environs.items() if part in command]
        assert {name for name, value in KEYS.items() if value in environ} == keys, part
    assert len(played.environs) == 5, list(played.environs)
    assert not [command for command in played.environs for key in KEYS.values() if key in command]


def test_a_frozen_role_samples_the_same_weights_in_every_step_and_never_trains(played: Played) -> None:
    accepted = results(played.run)
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
    view = episode_view("run", LedgerReader(played.run), accepted[0].episode_uuid)
    assert [(turn.role, turn.sequence is None) for turn in view.turns] == [
        ("", False),
        ("rival", True),
        ("", False),
    ]
    assert view.line.calls == 2
