"""How long a server that waits takes to serve, once the one that serves is gone.

    python bench/failover.py [--episodes N] [--rounds N] [--store postgresql://...]

Two server processes on one database, first with an empty book, which is the reference, then with N episodes.
Each round the one that serves is killed (SIGKILL), ended (SIGTERM) or stopped (SIGSTOP), and the time counts
until `/ready` of the other one answers 200; then the first one is started again, or goes on. The lease is a
part of it: 3 s for a server that cannot give it back. `cpu_s` is what the one that takes over uses of a
processor meanwhile.

Without `--store` it starts PostgreSQL, with PostgreSQL's own settings, in a temporary folder. A database that
is named is left with a schema `tinkerscript_bench...`.
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
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from interchange import PAYLOAD
from postgres_server import running_postgres
from tinkerscript.addresses import listen
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.trainer_link.keys import KEYS_DIR, load_trainer_keys
from tinkerscript.trainer_link.messages import NewEpisode
from tinkerscript.trainer_link.trainer_end import TrainerLink

POLL_S = 0.02

WAYS = {"killed": signal.SIGKILL, "ended": signal.SIGTERM, "stopped": signal.SIGSTOP}


class Taken(NamedTuple):
    """How long one server took to serve after the other."""

    seconds: float
    cpu_s: float


@dataclass
class Server:
    """One of the two processes."""

    folder: Path
    port: int
    link_port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=5, verify=False), repr=False)

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
            return self.http.get(f"http://127.0.0.1:{self.port}/ready").status_code
        except httpx.HTTPError:
            return 0

    def cpu_s(self) -> float:
        """Processor time that the process has used."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


@contextmanager
def two_servers(store: str) -> Generator[list[Server]]:
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


async def fill(leader: Server, episodes: int) -> None:
    async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise RuntimeError("nobody calls the model here")

    address = f"tcp://127.0.0.1:{leader.link_port}"
    keys = load_trainer_keys(leader.folder / KEYS_DIR)
    async with TrainerLink(address, trainer_id=uuid4().hex, model="none", sampler=sample, keys=keys) as link:
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


def one_round(way: str, leader: Server, other: Server) -> Taken:
    """Until the other one serves; afterwards both are up again."""
    before = other.cpu_s()
    leader.signal(WAYS[way])
    taken = Taken(other.until(200), other.cpu_s() - before)
    if way == "stopped":
        leader.signal(signal.SIGCONT)
    else:
        assert leader.process is not None
        leader.process.wait()
        leader.start()
    leader.until(503)
    return taken


def measure(servers: list[Server], rounds: int) -> dict[str, list[Taken]]:
    return {way: [one_round(way, *in_order(servers)) for _ in range(rounds)] for way in WAYS}


def show(episodes: int, empty: dict[str, list[Taken]], full: dict[str, list[Taken]]) -> None:
    for way in WAYS:
        reference = statistics.median(each.seconds for each in empty[way])
        seconds = [each.seconds for each in full[way]]
        row = {
            "way": way,
            "episodes": episodes,
            "empty_s": round(reference, 2),
            "median_s": round(statistics.median(seconds), 2),
            "slowest_s": round(max(seconds), 2),
            "ratio": round(statistics.median(seconds) / reference, 2),
            "cpu_s": round(statistics.median(each.cpu_s for each in full[way]), 2),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="", help="interchange_server.store, without a schema")
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    options = parser.parse_args()
    with ExitStack() as stack:
        store = options.store or stack.enter_context(running_postgres(settings=())).url
        servers = stack.enter_context(two_servers(store))
        empty = measure(servers, options.rounds)
        asyncio.run(fill(in_order(servers)[0], options.episodes))
        show(options.episodes, empty, measure(servers, options.rounds))


if __name__ == "__main__":
    main()
