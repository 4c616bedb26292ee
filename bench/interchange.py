"""What one request costs the interchange server, against an empty FastAPI endpoint.

    python bench/interchange.py [--rounds N] [--requests N] [--registered N] [--store URL]

A real server process, durable, with a trainer on its link that commits what became of every result; 64
connections. Processor time is the operating system's own account of the server process, so
that load generator and trainer, which share the machine, do not count. The reference is a FastAPI endpoint
that returns `{}`, in a process of its own with the same uvicorn settings, under the same load each round.
`--store postgresql://...` measures it over a database, and leaves a schema `tinkerscript_tmp...` there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psutil
import uvicorn
import uvloop
from fastapi import FastAPI

from load import Body, Keyed, Load, connect, cycle, send_all
from tinkerscript.addresses import ServerInfo, read_server_info
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.trainer_link.messages import NewEpisode
from tinkerscript.trainer_link.trainer_end import TrainerLink

CONNECTIONS = 64
PAYLOAD = json.dumps({"task": "bench", "sample": {"input": "What is 12+34?" * 10, "target": "46"}}).encode()
POLL_S = 0.02


@dataclass
class Server:
    """A server under load."""

    process: psutil.Process
    port: int

    def cpu_s(self) -> float:
        """By the clock of the process (Linux), in nanoseconds; /proc counts in hundredths of a second."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def memory_bytes(self) -> int:
        return self.process.memory_full_info().uss


@contextmanager
def running(command: list[str]) -> Generator[psutil.Process]:
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def interchange_server(run_dir: Path, store: str = "sqlite") -> Generator[tuple[Server, ServerInfo]]:
    config = RunConfig.model_validate({"interchange_server": {"interchange_server_port": 0, "store": store}})
    (run_dir / "config.yaml").write_text(dump_config(config))
    with running([sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(run_dir)]) as process:
        while (info := read_server_info(run_dir)) is None:
            if not process.is_running():
                raise SystemExit("the server did not start")
            psutil.wait_procs([process], timeout=POLL_S)
        yield Server(process, int(info.url.rpartition(":")[2])), info


def serve_empty(port: int) -> None:
    """The reference: what FastAPI itself costs."""
    app = FastAPI()

    @app.post("/empty")
    async def empty() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        return {}

    uvicorn.run(app, port=port, log_config=None, access_log=False, backlog=2048)


@contextmanager
def empty_server(port: int) -> Generator[Server]:
    with running([sys.executable, __file__, "--serve-empty", str(port)]) as process:
        yield Server(process, port)


async def until_listening(port: int) -> None:
    while True:
        try:
            (line,) = await connect(port, 1)
        except OSError:
            await asyncio.sleep(POLL_S)
        else:
            line.close()
            return


class Trainer:
    """Registers episodes; commits of every outcome that it was used."""

    def __init__(self, link: TrainerLink) -> None:
        self.link = link
        self.used = 0
        self._more = asyncio.Condition()

    async def register(self, count: int) -> None:
        episodes = [
            NewEpisode(episode_uuid=uuid4().hex, episode_type="train", group_id=f"g{i // 8}", payload=PAYLOAD)
            for i in range(count)
        ]
        await self.link.register(episodes)

    async def use(self) -> None:
        """Until cancelled."""
        while True:
            outcomes = await self.link.outcomes()
            self.link.note(
                [TrainedRow(episode=each.sequence, step=0, outcome=Use.EVALUATED) for each in outcomes]
            )
            async with self._more:
                self.used += len(outcomes)
                self._more.notify_all()

    async def until_used(self, count: int) -> None:
        """Return when the server has committed that `count` outcomes in all were used."""
        async with self._more:
            await self._more.wait_for(lambda: self.used >= count)
        await self.link.commit()


@asynccontextmanager
async def trainer_of(info: ServerInfo) -> AsyncGenerator[Trainer]:
    async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise RuntimeError("no episode of this benchmark calls the model")

    async with TrainerLink(info.link_address, trainer_id=uuid4().hex, model="none", sampler=sample) as link:
        await link.resume([])
        trainer = Trainer(link)
        using = asyncio.create_task(trainer.use())
        try:
            yield trainer
        finally:
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)


def claim_bodies(count: int, **more: Any) -> Iterator[bytes]:
    for number in range(count):
        claim = {
            "client_uuid": f"client-{number % CONNECTIONS}",
            "episode_type": "any",
            "allow_discard_timeout": 600.0,
            "claim_request_id": uuid4().hex,
            "sends_key": True,
        }
        yield msgspec.json.encode(claim | more)


def end_body(claim_reply: bytes) -> Keyed:
    claim: dict[str, Any] = msgspec.json.decode(claim_reply)
    if not claim["success"]:
        raise SystemExit(f"no episode: {claim['fail_cause']}")
    output = {
        "reward": 1.0,
        "is_success": True,
        "metadata": {"answer": "46", "scores": [1.0, 0.5], "turns": 3},
        "log_metrics": {"turns": 3.0},
    }
    end = {name: claim[name] for name in ("client_uuid", "episode_uuid")}
    return Keyed(msgspec.json.encode(end | {"workflow_output": output}), claim["openai_api_key"])


@dataclass
class Cost:
    """Of one kind of request."""

    cpu_us: float
    load: Load

    def percentile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.load.latencies_s, n=100)[percent - 1]


async def measured(server: Server, path: str, bodies: Sequence[Body], trainer: Trainer | None = None) -> Cost:
    """The cost of each request; with a trainer, of the commit that uses it too."""
    before, cpu = (trainer.used if trainer else 0), server.cpu_s()
    load = await send_all(server.port, path, bodies, connections=CONNECTIONS)
    if trainer:
        await trainer.until_used(before + len(bodies))
    return Cost(1e6 * (server.cpu_s() - cpu) / len(bodies), load)


async def one_round(server: Server, empty: Server, trainer: Trainer, requests: int) -> dict[str, Any]:
    reference = await measured(empty, "/empty", list(claim_bodies(requests)))
    await trainer.register(requests)
    claim = await measured(server, "/claim_episode", list(claim_bodies(requests)))
    ends = [end_body(reply) for reply in claim.load.replies]
    end = await measured(server, "/end_episode", ends, trainer)
    await trainer.register(requests)
    done = trainer.used + requests
    cycles = await cycle(
        server.port,
        ("/claim_episode", claim_bodies(requests)),
        ("/end_episode", end_body),
        CONNECTIONS,
    )
    await trainer.until_used(done)
    return {
        "empty_us": reference.cpu_us,
        "claim_us": claim.cpu_us,
        "end_us": end.cpu_us,
        "claim_ratio": claim.cpu_us / reference.cpu_us,
        "end_ratio": end.cpu_us / reference.cpu_us,
        **{
            f"{name}_p{p}_ms": cost.percentile_ms(p)
            for name, cost in (("claim", claim), ("end", end))
            for p in (50, 99)
        },
        "cycles_per_s": requests / cycles.seconds,
    }


async def with_many_registered(
    server: Server, empty: Server, trainer: Trainer, registered: int, requests: int
) -> dict[str, Any]:
    """The cost of a claim among many episodes, and the memory that they take."""
    before = server.memory_bytes()
    await trainer.register(registered)
    bytes_per_episode = (server.memory_bytes() - before) / registered
    reference = await measured(empty, "/empty", list(claim_bodies(requests)))
    claim = await measured(server, "/claim_episode", list(claim_bodies(requests, claim_request_id="")))
    return {
        "registered": registered,
        "empty_us": reference.cpu_us,
        "claim_us": claim.cpu_us,
        "claim_ratio": claim.cpu_us / reference.cpu_us,
        "claim_p99_ms": claim.percentile_ms(99),
        "bytes_per_episode": bytes_per_episode,
    }


async def long_polls(server: Server, clients: int, seconds: float) -> float:
    """Share of one core that the server uses while `clients` wait for an episode."""
    lines = await connect(server.port, clients)
    bodies = claim_bodies(clients, episode_type="eval", wait_s=60.0)
    waiting = [
        asyncio.create_task(line.ask("/claim_episode", body))
        for line, body in zip(lines, bodies, strict=True)
    ]
    await asyncio.sleep(2.0)  # They arrive; what follows is the waiting alone.
    cpu = server.cpu_s()
    await asyncio.sleep(seconds)
    share = (server.cpu_s() - cpu) / seconds
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for line in lines:
        line.close()
    return share


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}


async def bench(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, empty_server(options.empty_port) as empty:
        run_dir = Path(folder)
        with interchange_server(run_dir, options.store) as (server, info):
            await until_listening(empty.port)
            async with trainer_of(info) as trainer:
                await one_round(server, empty, trainer, options.requests // 4)  # Warm-up.
                rounds = [
                    await one_round(server, empty, trainer, options.requests) for _ in range(options.rounds)
                ]
                print(json.dumps(summary(rounds)))
                spread = (
                    [round(r["claim_ratio"], 2) for r in rounds],
                    [round(r["end_ratio"], 2) for r in rounds],
                )
                print(json.dumps({"claim_ratios": spread[0], "end_ratios": spread[1]}))
                share = await long_polls(server, 1000, 10.0)
                print(json.dumps({"long_polls": 1000, "share_of_a_core": round(share, 4)}))
                many = await with_many_registered(
                    server, empty, trainer, options.registered, options.requests
                )
                print(json.dumps({name: round(value, 2) for name, value in many.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000, help="of each kind in a round")
    parser.add_argument("--registered", type=int, default=100_000, help="episodes of the last measurement")
    parser.add_argument("--store", default="sqlite", help="interchange_server.store")
    parser.add_argument("--empty-port", type=int, default=18_231, help="of the reference")
    parser.add_argument("--serve-empty", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_empty:
        serve_empty(options.serve_empty)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bench(options))


if __name__ == "__main__":
    main()
