"""Every bound is driven to its limit and beyond, in combinations, against a real run: the demo, its workers
and the embedded engine, as `tinkerscript train` starts them. Nothing that a holder of a key sends ends the
run or fails a neighbor.

BOUND_COMBINATIONS changes their number; the default is `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path

import httpx
import processes
import pytest
import yaml
from evidence import query_file, read_ledger
from processes import Victim

from bound_drivers import SETTINGS, SUMS, TOKENS, Holder, combinations, drive_sum
from tinkerscript.addresses import read_server_info
from tinkerscript.files import LEDGER_FILE

DEMO = Path(__file__).parents[2] / "examples" / "arithmetic.yaml"
COMBINATIONS = int(os.environ.get("BOUND_COMBINATIONS", "2000"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
HOLDERS = 4
START_S = 300.0
MOST_STEPS = 10_000
"""More than the run comes to: it is stopped once every bound was driven."""


def written_config(tmp_path: Path) -> Path:
    config = yaml.safe_load(DEMO.read_text())
    config["experiment_dir"] = str(tmp_path / "run")
    config["task"]["name"] = str(DEMO.parent / config["task"]["name"])
    config["interchange_server"] = {"interchange_server_port": 0} | SETTINGS
    config["training"] |= {"steps": MOST_STEPS, "groups_per_step": 8}
    config["evaluation"] = {"episodes": 0, "every_steps": 0}
    config["workers"] = {"count": 1, "concurrency": 8}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.timeout(1800)
def test_no_bound_ends_a_run_or_fails_a_neighbor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "tinkerscript", "train", str(written_config(tmp_path))]
    run = Victim("run", command, tmp_path / "run.log", TOKENS)
    with processes.ended_at_last([run]):
        run.start()
        processes.until(lambda: _steps(run_dir, run) > 0, "the run's first step", seconds=START_S)
        before = _steps(run_dir, run)
        driven, refused, finished = asyncio.run(_drive(run_dir, run))
        during = _steps(run_dir, run) - before
        status = httpx.get(f"{_url(run_dir)}/fleet", headers=_as("ADMIN")).json()
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        run.process.wait(120)
    with capfd.disabled():
        print(
            f"\n{driven} combinations and {len(SUMS)} sums, {refused} refused by name; "
            f"{finished} episodes of a neighbor, {during} steps"
        )
    assert driven >= COMBINATIONS
    assert during > 0, "the run trained meanwhile"
    assert status["engine_status"] == "ENGINE.ROLLING"
    assert not [each for each in status["failed"] if each["pool"] == ""], "no episode of the run has failed"
    ledger = read_ledger(partial(query_file, run_dir / LEDGER_FILE))
    accepted = [each for each in ledger.episodes if each["state"] == "ended"]
    honest = [each for each in accepted if each["pool"] == ""]
    assert honest
    failures = [each["failures"] for each in honest if each["failures"]]
    assert not failures, "no attempt of a neighbor has failed"
    assert len([each for each in accepted if each["client"] == "neighbor"]) == finished


async def _drive(run_dir: Path, run: Victim) -> tuple[int, int, int]:
    """Drive all bounds beside a neighbor. Returns the numbers of combinations, of refusals, and of the
    neighbor's episodes."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    rng = random.Random(SEED)
    waiting = combinations(rng, COMBINATIONS)
    driven = refused = 0

    async def hold(holder: Holder) -> None:
        nonlocal driven, refused
        for combination in waiting:
            run.check()
            await holder.drive(combination)
            driven += 1
            refused += bool(combination.beyond)

    async with httpx.AsyncClient(base_url=_url(run_dir), timeout=120, limits=limits) as http:
        neighbor = asyncio.create_task(_work(Holder(http, random.Random(SEED), "neighbor")))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(HOLDERS):
                    tasks.create_task(hold(Holder(http, random.Random(number), f"holder-{number}")))
            for name in SUMS:
                await drive_sum(Holder(http, random.Random(name), "holder"), name)
                refused += 1
            assert not neighbor.done(), neighbor.exception()
        finally:
            stop.set()
        return driven, refused, await neighbor


stop = asyncio.Event()


async def _work(neighbor: Holder) -> int:
    """An honest client, which finishes one episode after the other; how many."""
    finished = 0
    while not stop.is_set():
        (claim,) = await neighbor.claims(client="neighbor")
        key = claim["openai_api_key"]
        messages = [{"role": "user", "content": "12+34"}]
        body = {"model": "policy", "messages": messages, "max_tokens": 8}
        said = await neighbor.post("/v1/chat/completions", body, key=key)
        assert said.status_code == 200, said.text
        ended = await neighbor.post("/end_episode", {"workflow_output": {"reward": 0.5}}, key=key)
        assert ended.json()["success"], ended.text
        finished += 1
    return finished


def _steps(run_dir: Path, run: Victim) -> int:
    """Steps that the run has trained."""
    run.check()
    if read_server_info(run_dir) is None:
        return 0
    return len(query_file(run_dir / LEDGER_FILE, "SELECT step FROM {s}steps"))


def _url(run_dir: Path) -> str:
    info = read_server_info(run_dir)
    assert info is not None
    return info.url


def _as(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[f'TINKERSCRIPT_{role}_TOKEN']}"}
