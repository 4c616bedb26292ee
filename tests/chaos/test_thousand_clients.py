"""A thousand clients at once work through 20,000 episodes on one server, and none sees an error."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import processes
import psutil
import pytest
from crowd import CROWD
from evidence import read_lines, read_rows

from tinkerscript.server.store.sqlite import STORE_FILE
from tinkerscript.trainer_link.messages import EpisodeAccepted, NewEpisode
from tinkerscript.trainer_link.trainer_end import TrainerLink

PROCESSES = 2


async def _no_samples(request: object, progress: object = None) -> Any:
    raise RuntimeError("nobody calls the model here")


@pytest.mark.timeout(580)
async def test_a_thousand_clients_see_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clients = int(os.environ.get("CHAOS_CLIENTS", "1000"))
    episodes = int(os.environ.get("CHAOS_CROWD_EPISODES", "20000"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * clients)), hard))
    processes.write_config(tmp_path)
    server = processes.server(tmp_path)
    crowds = []
    with processes.ended_at_last([server]):
        server.start()
        info = processes.listening(tmp_path, server)
        names = [f"e{number}" for number in range(episodes)]
        link = TrainerLink(info.link_address, trainer_id="t", model="none", sampler=_no_samples)
        async with link:
            await link.register(
                [
                    NewEpisode(
                        episode_uuid=name,
                        episode_type="train",
                        group_id="g",
                        payload=json.dumps({"name": name}).encode(),
                    )
                    for name in names
                ]
            )
            began = time.perf_counter()
            share = clients // PROCESSES
            for number in range(PROCESSES):
                options = ("--server", info.url, "--clients", share, "--first", number * share)
                crowd = processes.script("crowd", tmp_path, *options, log=f"crowd-{number}")
                crowds.append(crowd)
                crowd.start()
            with processes.ended_at_last(crowds):
                received = await _all_results(link, episodes)
                seconds = time.perf_counter() - began
                for crowd in crowds:
                    assert crowd.process is not None
                    code = await asyncio.to_thread(crowd.process.wait, 60)
                    assert code == 0, crowd.log.read_text()[-3000:]
            await link.flush()
            assert server.process is not None
            memory = psutil.Process(server.process.pid).memory_info().rss / 2**20
    assert received == {name: name for name in names}
    assert {row.state for row in read_rows(tmp_path / STORE_FILE).values()} == {"accepted"}
    told = read_lines(tmp_path / CROWD)
    assert len(told) == clients
    assert sum(line["ended"] for line in told) == episodes
    with capfd.disabled():
        slowest = max(line["slowest_s"] for line in told)
        print(
            f"\n{clients} clients, {episodes} episodes in {seconds:.0f} s ({episodes / seconds:.0f}/s), "
            f"slowest begin and end {slowest:.1f} s, server {memory:.0f} MiB"
        )


async def _all_results(link: TrainerLink, count: int) -> dict[str, str]:
    """Episode -> the name that its result carries."""
    names: dict[str, str] = {}
    async with asyncio.timeout(500):
        while len(names) < count:
            outcomes = await link.outcomes()
            for outcome in outcomes:
                assert isinstance(outcome, EpisodeAccepted)
                assert outcome.episode_uuid not in names
                names[outcome.episode_uuid] = str(outcome.metadata["name"])
            link.acknowledge([outcome.episode_uuid for outcome in outcomes])
    return names
