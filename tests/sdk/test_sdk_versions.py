"""`engine.backend: tinker` with the oldest and the newest SDK, against our own wire server.

Each SDK runs in its own process (`sdk_runs.py`); `make acceptance` installs the oldest into a folder for
PYTHONPATH. The server runs here, with the newest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plain_sums import SUMS
from short_runs import curve, short_run
from tinkerscript.model_folder import TINY_MODEL
from wire_setup import KEY, SDK_LEAVES_SOCKETS, AnswersInJson, Wire, wire_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.xdist_group("sdk"), SDK_LEAVES_SOCKETS]

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv" / "oldest-sdk" / "site-packages"


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with wire_server(TINY_MODEL, tmp_path_factory.mktemp("wire"), name="tiny-served") as made:
        yield made


@pytest.fixture(scope="module")
def json_wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server from before protobuf answers."""
    root = tmp_path_factory.mktemp("json")
    with wire_server(TINY_MODEL, root, name="tiny-served", around=AnswersInJson) as made:
        yield made


def job(url: str, folder: Path, *, steps: int = 3, resume: bool = False) -> dict[str, Any]:
    """A run of `steps` in `folder`, or its rest."""
    training = {"steps": steps, "groups_per_step": 4, "group_size": 4, "learning_rate": 5e-4}
    config = short_run(
        folder,
        seed=11,
        engine={"backend": "tinker", "base_url": url, "lora": {"rank": 8, "targets": ["attn", "mlp"]}},
        task=SUMS,
        training=training | {"lr_schedule": "constant", "kl_penalty_coef": 0.05},
    ).model_dump(mode="json", exclude_unset=True)
    return {"config": config, "resume": str(folder) if resume else None}


def outcomes_of(sdk: Path | None, folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each job's run gave with the SDK in the folder `sdk`, or with the installed one."""
    assert sdk is None or sdk.exists(), "make acceptance installs the oldest SDK"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sdk_runs.py")],
        cwd=folder,
        env=os.environ
        | {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
        | ({"PYTHONPATH": str(sdk)} if sdk else {}),
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_newest_sdk_trains_and_refuses_a_server_that_answers_in_json(
    newest: Path, newest_outcomes: list[dict[str, Any]], wire: Wire
) -> None:
    whole, refused = newest_outcomes
    assert (whole["error"], whole["notes"]) == ("", [])
    assert [line["step"] for line in curve(newest)] == [1, 2, 3]
    assert any(line["train/kl_start"] != 0 for line in curve(newest))
    assert wire.state.sessions.all()[-1].finished == "interrupted: the trainer ended"
    assert "EngineError" in refused["error"]
    assert "no longer reads: pip install 'tinker>=0.24,<0.25'" in refused["error"]
    assert refused["episodes"] == 0


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("newest") / "run"


@pytest.fixture(scope="module")
def newest_outcomes(newest: Path, wire: Wire, json_wire: Wire) -> list[dict[str, Any]]:
    jobs = [job(wire.url, newest), job(json_wire.url, newest.with_name("refused"))]
    return outcomes_of(None, newest.parent, jobs)


def test_the_oldest_sdk_gives_the_same_run_from_both_kinds_of_answers(
    newest: Path, newest_outcomes: list[dict[str, Any]], wire: Wire, json_wire: Wire, tmp_path: Path
) -> None:
    """From protobuf answers, resumed after the second step; and from JSON."""
    assert not newest_outcomes[0]["error"]
    from_protobuf, from_json = tmp_path / "protobuf", tmp_path / "json"
    jobs = [
        job(wire.url, from_protobuf, steps=2),
        job(wire.url, from_protobuf, resume=True),
        job(json_wire.url, from_json),
    ]
    fetched = AnswersInJson.fetched
    runs = outcomes_of(OLDEST, tmp_path, jobs)
    assert [run["error"] for run in runs] == ["", "", ""]
    assert all(
        "tinker 0.24.1 cannot finish a session (0.27.2 and later can)" in run["notes"][0] for run in runs
    )
    assert AnswersInJson.fetched > fetched
    for folder in (from_protobuf, from_json):
        for one, other in zip(curve(folder), curve(newest), strict=True):
            assert one["reward/mean"] == other["reward/mean"]
            assert max(line["alignment/max_abs_dlogp"] for line in (one, other)) < 1e-4
            for name in ("train/loss", "train/grad_norm", "train/kl_start"):
                assert one[name] == pytest.approx(other[name], abs=1e-4, rel=1e-4), name
    command = [sys.executable, "-m", "tinkerscript", "engine", "--port", "0"]
    started = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(OLDEST)}, capture_output=True, text=True, timeout=100
    )
    assert started.returncode == 2
    assert "engine --port needs tinker 0.38 or later, and 0.24.1 is installed" in started.stderr
