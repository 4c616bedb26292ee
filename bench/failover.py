"""How long a server that waits takes to serve, once the one that serves is gone.

    python bench/failover.py --store postgresql://... [--episodes N] [--rounds N]

Two server processes on one database, with N episodes in the book. Each round the one that serves is killed
(SIGKILL), ended (SIGTERM) or stopped (SIGSTOP), and the time counts until `/ready` of the other one answers
200; then the first one is started again, or goes on. The reference is the lease: 3 s for a server that cannot
give it back, 0 for one that can. It leaves a schema `tinkerscript_bench...` in the database.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx

from interchange import PAYLOAD
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.gateway.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.server.addresses import listen
from tinkerscript.trainer_link.messages import NewEpisode
from tinkerscript.trainer_link.trainer_end import TrainerLink

POLL_S = 0.02
WAYS = {"killed": signal.SIGKILL, "ended": signal.SIGTERM, "stopped": signal.SIGSTOP}


@dataclass
class Server:
    """One of the two processes."""

    folder: Path
    port: int
    link_port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(self.folder)]
        silent = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def until(self, status: int) -> float:
        """Seconds until `/ready` answers so."""
        began = time.perf_counter()
        while self.status() != status:
            time.sleep(POLL_S)
        return time.perf_counter() - began

    def status(self) -> int:
        """Of `/ready`; 0 without an answer."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=5).status_code
        except httpx.HTTPError:
            return 0


@contextmanager
def two_servers(store: str) -> Iterator[list[Server]]:
    store += f"{'&' if '?' in store else '?'}schema=tinkerscript_bench_{uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        servers = [_server(Path(folder) / name, store) for name in ("one", "two")]
        try:
            for server in servers:
                server.start()
            yield servers
        finally:
            for server in servers:
                if server.process is not None:
                    server.process.kill()
                    server.process.wait()


def _server(folder: Path, store: str) -> Server:
    server = Server(folder, _free_port(), _free_port())
    section = {
        "store": store,
        "interchange_server_port": server.port,
        "interchange_method": "tcp",
        "link_port": server.link_port,
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(
        dump_config(RunConfig.model_validate({"interchange_server": section}))
    )
    return server


def _free_port() -> int:
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


async def fill(servers: list[Server], episodes: int) -> None:
    async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise RuntimeError("nobody calls the model here")

    links = [f"tcp://127.0.0.1:{server.link_port}" for server in servers]
    async with TrainerLink(links, trainer_id=uuid4().hex, model="none", sampler=sample) as link:
        for begin in range(0, episodes, 5000):
            await link.register(
                [
                    NewEpisode(episode_uuid=f"e{number}", episode_type="train", group_id="g", payload=PAYLOAD)
                    for number in range(begin, min(begin + 5000, episodes))
                ]
            )


def in_order(servers: list[Server]) -> list[Server]:
    """The one that serves, and the one that waits, once there are both."""
    while sorted(states := [server.status() for server in servers]) != [200, 503]:
        time.sleep(POLL_S)
    return sorted(servers, key=lambda server: states[servers.index(server)])


def one_round(leader: Server, other: Server, way: str) -> float:
    """Seconds until the other one serves; afterwards both are up again."""
    leader.signal(WAYS[way])
    seconds = other.until(200)
    if way == "stopped":
        leader.signal(signal.SIGCONT)
    else:
        assert leader.process is not None
        leader.process.wait()
        leader.start()
    leader.until(503)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", required=True, help="interchange_server.store, without a schema")
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    options = parser.parse_args()
    with two_servers(options.store) as servers:
        in_order(servers)
        asyncio.run(fill(servers, options.episodes))
        for way in WAYS:
            times = [one_round(*in_order(servers), way) for _ in range(options.rounds)]
            row = {"way": way, "episodes": options.episodes, "median_s": round(statistics.median(times), 2)}
            print(json.dumps(row | {"slowest_s": round(max(times), 2)}), flush=True)


if __name__ == "__main__":
    main()
