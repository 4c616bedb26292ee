"""The server is killed again and again under load, each time right after it has confirmed results: it still
has them, and each time it is back.

CHAOS_RESTARTS changes their number, half of them over each kind of link; the default is `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import processes
import pytest
from evidence import open_episodes, query_file
from processes import Victim

from interchange_helpers import new_episodes, trainer
from run_ledger import used
from tinkerscript.addresses import ServerInfo
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.errors import ClaimLostError, NoEpisodeError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.trainer_link.keys import load_trainer_keys
from tinkerscript.trainer_link.messages import EpisodeAccepted
from tinkerscript.trainer_link.trainer_end import TrainerLink

FRESH = 10
"""Results confirmed before each kill, at least."""

CLIENTS = 8
BUSY = 2
"""Processes that do nothing but keep the processor busy."""


class Trial:
    """Clients that end episodes, whatever happens to the server; it is killed when enough are confirmed."""

    def __init__(self, server: Victim) -> None:
        self._server = server
        self.confirmed: dict[str, float] = {}
        self._fresh = 0
        self._killed = asyncio.Event()

    async def one_kill(self) -> None:
        """Return when `FRESH` more results are confirmed, and the server is dead."""
        self._fresh = 0
        self._killed.clear()
        await self._killed.wait()

    async def work(self, url: str, number: int) -> None:
        """The one who is told of the tenth result kills the server at once."""
        async with AsyncTinkerScriptClient(url, client_uuid=f"c{number}", timeout_s=None) as client:
            while True:
                try:
                    episode = await client.begin_episode(wait_s=10)
                    reward = float(len(self.confirmed))
                    await client.end_episode(episode, reward)
                except (ClaimLostError, NoEpisodeError):
                    continue
                self.confirmed[episode.episode_uuid] = reward
                self._fresh += 1
                if self._fresh == FRESH:
                    self._server.kill()
                    self._killed.set()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["ipc", "tcp"])
async def test_a_killed_server_is_back_with_all_that_it_confirmed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    restarts = int(os.environ.get("CHAOS_RESTARTS", "50")) // 2
    processes.write_config(tmp_path, interchange_method=method)
    server = processes.server(tmp_path)
    busy = (sys.executable, "-c", "while True: pass")
    loops = [Victim(f"busy-{number}", busy, tmp_path / "busy.log") for number in range(BUSY)]
    with processes.ended_at_last([server, *loops]):
        for loop in loops:
            loop.start()
        info = _started(tmp_path, server)
        # The trainer and the clients outlive the server. The trainer takes no outcomes yet.
        trial = Trial(server)
        async with _link(info) as link, asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(trial.work(info.url, number)) for number in range(CLIENTS)]
            for number in range(restarts):
                names = [f"e{number}-{each}" for each in range(FRESH + 2 * CLIENTS)]
                await link.register(new_episodes(*names))
                await trial.one_kill()
                rows = open_episodes(partial(query_file, tmp_path / LEDGER_FILE))
                missing = [name for name in trial.confirmed if rows[name].state != "ended"]
                assert not missing, f"kill {number}: {missing}"
                again = await asyncio.to_thread(_started, tmp_path, server)
                assert (again.url, again.link_address) == (info.url, info.link_address)
            for client in clients:
                client.cancel()
        delivered = await _deliver_all(info, len(trial.confirmed))
    assert {name: delivered[name] for name in trial.confirmed} == trial.confirmed
    with capfd.disabled():
        print(f"\n{restarts} kills of the server over {method}; all {len(trial.confirmed)} results are there")


def _started(run_dir: Path, server: Victim) -> ServerInfo:
    server.start()
    return processes.listening(run_dir, server)


def _link(info: ServerInfo) -> TrainerLink:
    keys = load_trainer_keys(Path(info.link_keys)) if info.link_keys else None
    return trainer(info.link_address, keys=keys)


async def _deliver_all(info: ServerInfo, count: int) -> dict[str, float]:
    """Every result that the server still has, by episode, as a trainer receives them."""
    rewards: dict[str, float] = {}
    async with _link(info) as link, asyncio.timeout(60):
        await link.resume([])
        while len(rewards) < count:
            outcomes = await link.outcomes()
            results = [outcome for outcome in outcomes if isinstance(outcome, EpisodeAccepted)]
            rewards.update({result.episode_uuid: result.reward for result in results})
            link.note(used(outcomes))
        await link.commit()
    return rewards
