"""The server is killed again and again, each time right after it has confirmed results: it still has them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import processes
import pytest
from evidence import read_rows
from processes import Victim

from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.errors import ServerUnreachableError
from tinkerscript.server.store.sqlite import STORE_FILE
from tinkerscript.trainer_link.messages import NewEpisode, Result
from tinkerscript.trainer_link.trainer_end import TrainerLink

FRESH = 10
"""Results confirmed before each kill, at least."""

CLIENTS = 8


async def _no_samples(request: object, progress: object = None) -> Any:
    raise RuntimeError("nobody calls the model here")


class Trial:
    """Clients that end episodes until the server is killed under them."""

    def __init__(self, run_dir: Path, server: Victim) -> None:
        self._run_dir = run_dir
        self._server = server
        self.confirmed: dict[str, float] = {}
        self._fresh = 0

    async def one_kill(self, url: str) -> None:
        self._fresh = 0
        clients = [self._end_episodes(url, number) for number in range(CLIENTS)]
        await asyncio.gather(*clients)
        assert self._server.process is not None
        assert self._server.process.poll() is not None

    async def _end_episodes(self, url: str, number: int) -> None:
        """Until the server is gone; the one who is told of the tenth result kills it at once."""
        async with AsyncTinkerScriptClient(url, client_uuid=f"c{number}", timeout_s=0) as client:
            try:
                while True:
                    episode = await client.begin_episode(wait_s=10)
                    reward = float(len(self.confirmed))
                    await client.end_episode(episode, reward)
                    self.confirmed[episode.episode_uuid] = reward
                    self._fresh += 1
                    if self._fresh == FRESH:
                        self._server.kill()
            except (ServerUnreachableError, httpx.HTTPError):
                return


@pytest.mark.timeout(400)
async def test_no_confirmed_result_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kills = int(os.environ.get("CHAOS_SERVER_KILLS", "50"))
    processes.write_config(tmp_path)
    server = processes.server(tmp_path)
    trial = Trial(tmp_path, server)
    with processes.ended_at_last([server]):
        server.start()
        info = processes.listening(tmp_path, server)
        for number in range(kills):
            # A trainer that registers, and never hears of a result: the server alone keeps them.
            link = TrainerLink(info.link_address, trainer_id=f"t{number}", model="none", sampler=_no_samples)
            async with link:
                names = [f"e{number}-{each}" for each in range(FRESH + 2 * CLIENTS)]
                await link.register(
                    [
                        NewEpisode(episode_uuid=name, episode_type="train", group_id="g", payload=b"{}")
                        for name in names
                    ]
                )
                await trial.one_kill(info.url)
            rows = read_rows(tmp_path / STORE_FILE)
            missing = [name for name in trial.confirmed if rows[name].state != "ended"]
            assert not missing, f"kill {number}: {missing}"
            server.start()
            info = processes.listening(tmp_path, server)
        delivered = await _deliver_all(info.link_address, len(trial.confirmed))
    assert {name: delivered[name] for name in trial.confirmed} == trial.confirmed
    with capfd.disabled():
        print(f"\n{kills} kills of the server; {len(trial.confirmed)} confirmed results, none lost")


async def _deliver_all(address: str, count: int) -> dict[str, float]:
    """Every result that the server still has, by episode, as a trainer receives them."""
    rewards: dict[str, float] = {}
    async with TrainerLink(address, trainer_id="last", model="none", sampler=_no_samples) as link:
        async with asyncio.timeout(60):
            while len(rewards) < count:
                outcomes = await link.outcomes()
                results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
                rewards.update({result.episode_uuid: result.reward for result in results})
                link.acknowledge([outcome.episode_uuid for outcome in outcomes])
        await link.flush()
    return rewards
