"""A run whose episodes play against a frozen role: who sampled what, and what trains."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from interchange_helpers import until
from tinkerscript.config import RunConfig
from tinkerscript.page.episode_view import episode_view
from tinkerscript.record.reader import Record
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.server.auth import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.testing import QuietReporter
from tinkerscript.train.backends.backend import FrozenModel
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.journal import read_journal
from tinkerscript.train.run import run_training
from tinkerscript.trainer_link.messages import EpisodeAccepted

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic.py"

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
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "run"),
            "interchange_server": {"interchange_server_port": 0, "processes": 2},
            "task": {"name": f"{ARITHMETIC}@arithmetic", "train_args": {"split": "train"}},
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
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "run"),
            "interchange_server": {
                "interchange_server_port": 0,
                "processes": 2,
                "clients": [{"name": "team", "token_env": "TEAM_TOKEN"}],
            },
            "task": {"name": f"{ARITHMETIC}@arithmetic", "train_args": {"split": "train"}},
            "roles": {
                "judge": {
                    "kind": "outside",
                    "base_url": "http://127.0.0.1:9/v1",
                    "model": "m",
                    "api_key_env": "JUDGE_KEY",
                }
            },
            "training": {"steps": 1, "groups_per_step": 1, "group_size": 2, "learning_rate": 0.01},
            "evaluation": {"episodes": 0},
            "workers": {"count": 1, "concurrency": 2, "script": str(tmp_path / "judged.py")},
        }
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


@pytest.mark.timeout(300)
async def test_a_teacher_that_episodes_call_too_scores_what_a_worker_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an adapter that another run has trained, and is opened once."""
    base: dict[str, Any] = {
        "interchange_server": {"interchange_server_port": 0},
        "task": {"name": f"{ARITHMETIC}@arithmetic", "train_args": {"split": "train"}},
        "engine": {"lora": {"rank": 4}},
        "training": {"steps": 1, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.02},
        "evaluation": {"episodes": 0},
    }
    alone = base | {"experiment_dir": str(tmp_path / "first"), "enable_tinkerscript_mode": False}
    first = await run_training(RunConfig.model_validate(alone), QuietReporter())
    (checkpoint,) = first.checkpoints.glob("final")
    (tmp_path / "play.py").write_text(SCRIPT, encoding="utf-8")
    opened: list[str] = []
    open_frozen = EmbeddedBackend.open_frozen

    async def counted(self: EmbeddedBackend, model: str) -> FrozenModel:
        opened.append(model)
        return await open_frozen(self, model)

    monkeypatch.setattr(EmbeddedBackend, "open_frozen", counted)
    same = {"kind": "frozen", "model": str(checkpoint)}
    training = base["training"] | {"steps": 2, "distillation": {"teacher": "teacher", "reward_coef": 1.0}}
    taught = base | {
        "experiment_dir": str(tmp_path / "taught"),
        "roles": {"teacher": same, "rival": same},
        "training": training,
        "workers": {"count": 1, "concurrency": 4, "script": str(tmp_path / "play.py")},
    }
    folder = await run_training(RunConfig.model_validate(taught), QuietReporter())
    assert opened == [str(checkpoint)]
    accepted = [e for e in read_journal(folder.path / "journal.jsonl") if isinstance(e, EpisodeAccepted)]
    assert [[call.role for call in episode.all_calls] for episode in accepted] == [["", "rival", ""]] * 8
    steps = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    measured = [step["distillation/teacher_kl"] for step in steps if "distillation/teacher_kl" in step]
    assert len(measured) == 2
    assert all(np.isfinite(measured))
    assert measured[0] != 0.0  # The adapter is not its base.
