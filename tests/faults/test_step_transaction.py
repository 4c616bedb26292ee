"""The server is killed between any two statements of a step's transaction, and before and after its commit:
the step is in the ledger once, whole, and so is what it trained on."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import dying_server
import pytest
from dying_server import DEAD

from forked import Forked
from interchange_helpers import collect, new_episodes, trainer
from tinkerscript.addresses import ServerInfo, read_server_info
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.rows import (
    FindingRow,
    MetricRow,
    PublicationRow,
    StepRow,
    TrainedRow,
    TrainerRow,
    Use,
)
from tinkerscript.trainer_link.messages import Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink

EPISODES = 4
NAMES = [f"e{number}" for number in range(EPISODES)]


@pytest.mark.timeout(300)
async def test_a_step_is_written_once_wherever_the_server_dies(tmp_path: Path) -> None:
    deaths = 0
    for point in itertools.count(1):
        died = await _step_with_a_death_at(tmp_path / str(point), point)
        if not died:
            break
        deaths += 1
    # BEGIN, an INSERT for each of seven tables, COMMIT, and after it.
    assert deaths >= 10


async def _step_with_a_death_at(run_dir: Path, point: int) -> bool:
    """Train a step with a server that dies at the point; whether it got that far."""
    run_dir.mkdir()
    config = RunConfig.model_validate({"interchange_server": {"interchange_server_port": 0}})
    (run_dir / "config.yaml").write_text(dump_config(config))
    with _server(run_dir, point) as server:
        info = await asyncio.to_thread(_listening, run_dir, server)
        async with trainer(info.link_address) as link:
            assert (await link.resume([])).step == 0
            outcomes = await _ended_episodes(info, link)
            committing = asyncio.create_task(link.commit(_rows(outcomes)))
            ended = asyncio.create_task(asyncio.to_thread(server.wait))
            await asyncio.wait((committing, ended), return_when=asyncio.FIRST_COMPLETED)
            if died := not committing.done():
                assert await ended == DEAD
                assert _counts(run_dir) in ([0] * len(WHOLE), WHOLE)  # None of it, or all.
                with _server(run_dir, 0) as again:
                    await asyncio.to_thread(_listening, run_dir, again)
                    await asyncio.wait_for(committing, 30)
                    await _nothing_is_open(run_dir)
            else:
                server.kill()
                await ended
    assert _counts(run_dir) == WHOLE
    return died


async def _ended_episodes(info: ServerInfo, link: TrainerLink) -> list[Outcome]:
    await link.register(new_episodes(*NAMES))
    link.set_status(engine_status="ENGINE.ROLLING")
    async with AsyncTinkerScriptClient(info.url, client_uuid="c") as client:
        for _ in NAMES:
            await client.end_episode(await client.begin_episode(wait_s=10), 1.0)
    return list((await collect(link, EPISODES)).values())


def _rows(outcomes: list[Outcome]) -> list[TrainerRow]:
    now = time.time()
    return [
        PublicationRow(policy_version=1, step=1, time=now),
        StepRow(step=1, time=now, policy_version=1),
        MetricRow(name="reward/mean", step=1, value=1.0),
        FindingRow(step=1, kind="warning", name="retokenised"),
        *(TrainedRow(episode=each.sequence, step=1, outcome=Use.TRAINED, place=0) for each in outcomes),
    ]


async def _nothing_is_open(run_dir: Path) -> None:
    """A trainer that begins now gets no outcome again."""
    info = read_server_info(run_dir)
    assert info is not None
    async with trainer(info.link_address) as link:
        history = await link.resume([])
        tally = await link.tally()
    # Without a checkpoint the step is undone, and its episodes are its own again: once each.
    assert history.step == 0
    assert [plan.episode_uuid for plan in history.planned] == NAMES
    assert tally.planned_accepted == EPISODES


WHOLE = [1, 1, 1, EPISODES, EPISODES]
"""The `_counts` after one step."""


def _counts(run_dir: Path) -> list[int]:
    """The rows of steps, of what was measured and found, of what they trained on, and of consumed episodes:
    undone or not, each once."""
    queries = (
        "SELECT count(*) FROM steps",
        "SELECT count(*) FROM metrics",
        "SELECT count(*) FROM findings",
        "SELECT count(DISTINCT episode) FROM trained",
        "SELECT count(*) FROM episodes WHERE EXISTS (SELECT 1 FROM trained WHERE episode = sequence)",
    )
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as run:
        ((doubled,),) = run.execute(
            "SELECT count(*) FROM (SELECT 1 FROM trained GROUP BY episode HAVING count(*) > 1)"
        ).fetchall()
        assert not doubled
        return [run.execute(query).fetchone()[0] for query in queries]


@contextmanager
def _server(run_dir: Path, point: int) -> Generator[Forked]:
    process = Forked(dying_server.main, (run_dir, point), cwd=run_dir, output=run_dir / "server.log")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _listening(run_dir: Path, process: Forked) -> ServerInfo:
    while (info := read_server_info(run_dir)) is None or info.pid != process.pid:
        assert process.poll() is None, (run_dir / "server.log").read_text()
        time.sleep(0.02)
    return info
