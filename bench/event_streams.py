"""What open pages cost the interchange server beside them: event streams, and the longest turns of the loops.

A real server process, the page of its run beside it, and a trainer that says what it does: every stream has
an event each second. The cost of a claim is the server process's own processor time, with streams and
without in turns, under the load of `interchange.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from interchange import (
    Server,
    Trainer,
    claim_bodies,
    end_body,
    interchange_server,
    measured,
    trainer_of,
)
from load import send_all
from tinkerscript.files import RUN_ID
from tinkerscript.ledger.reader import STATUS
from tinkerscript.ledger.rows import FactRow
from tinkerscript.train.step_rows import metric_rows

STREAMS = 50
FLEETS = 200
BATCH = 500
"""Episodes that are registered at once, as a trainer does for a step."""

TOLD_EVERY_S = 0.25
START_S = 60.0
WATCHED = Path(__file__).parent / "watched"


@contextmanager
def viewed(folder: Path) -> Generator[tuple[str, psutil.Process]]:
    """The URL of `tinkerscript view` over the runs in `folder`, and its process."""
    command = [sys.executable, "-m", "tinkerscript", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().rstrip("/")
            if not url:
                raise SystemExit("the page did not start")
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def get(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a GET; the reply is still to be read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    return reader, writer


async def read(port: int, path: str) -> bytes:
    """The whole reply. Raises SystemExit for one that is not 200."""
    reader, writer = await get(port, path)
    reply = await reader.read()
    writer.close()
    if not reply.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"{path}: {reply[:300]!r}")
    return reply


@dataclass
class Streams:
    """Open event streams."""

    events: int = 0

    async def follow(self, port: int, run: str) -> None:
        """Read one until cancelled."""
        reader, writer = await get(port, f"/api/runs/{run}/events")
        try:
            while line := await reader.readline():
                self.events += line.startswith(b"event: run")
            raise SystemExit("an event stream ended")
        finally:
            writer.close()


@asynccontextmanager
async def streams(port: int, run: str, count: int) -> AsyncGenerator[Streams]:
    """`count` open streams, each of which has had its first event."""
    found = Streams()
    tasks = [asyncio.create_task(found.follow(port, run)) for _ in range(count)]
    try:
        async with asyncio.timeout(START_S):
            while found.events < count:
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def told(trainer: Trainer, run_dir: Path) -> AsyncGenerator[None]:
    """The trainer says all the time what it does."""

    async def tell() -> None:
        status: dict[str, Any] = {"state": "running", "began": time.time(), "steps": 10**6}
        for number in range(10**9):
            status |= {"step": number, "phase": {"label": "a step", "done": number % 64, "total": 64}}
            said = FactRow(name=STATUS, value=json.dumps(status).encode())
            await trainer.link.commit([said, *metric_rows(number, {"reward/mean": 0.5})])
            await asyncio.sleep(TOLD_EVERY_S)

    (run_dir / RUN_ID).write_text(uuid4().hex)
    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def claim_cost(server: Server, trainer: Trainer, requests: int) -> float:
    """Processor time of a claim in microseconds. The episodes end afterwards."""
    await trainer.register(requests)
    claims = await measured(server, "/claim_episode", list(claim_bodies(requests)))
    await measured(server, "/end_episode", [end_body(reply) for reply in claims.load.replies], trainer)
    return claims.cpu_us


async def streams_part(rounds: int, requests: int) -> dict[str, Any]:
    """The cost of a claim with `STREAMS` open streams over that with none, in alternating pairs."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        with interchange_server(run_dir) as (server, info):
            async with trainer_of(info) as trainer, told(trainer, run_dir):
                with viewed(run_dir) as (url, _):
                    page = port_of(url), run_dir.name
                    async with streams(*page, 1):
                        await claim_cost(server, trainer, requests // 4)  # Warm-up.
                    pairs = [await one_pair(server, trainer, page, requests, n) for n in range(rounds)]
    ratios = [pair["with"] / pair["without"] for pair in pairs]
    return {
        "streams": STREAMS,
        "claim without, us": round(statistics.median(pair["without"] for pair in pairs), 1),
        "claim with, us": round(statistics.median(pair["with"] for pair in pairs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "events a second and stream": round(
            statistics.median(pair["events"] / pair["seconds"] / STREAMS for pair in pairs), 2
        ),
    }


async def one_pair(
    server: Server, trainer: Trainer, page: tuple[int, str], requests: int, number: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("with", "without")[:: 1 if number % 2 else -1]:
        async with streams(*page, STREAMS if kind == "with" else 0) as opened:
            events, began = opened.events, time.perf_counter()
            found[kind] = await claim_cost(server, trainer, requests)
            if kind == "with":
                found |= {"events": opened.events - events, "seconds": time.perf_counter() - began}
    return found


# The loop's longest turn


@contextmanager
def noted(folder: Path) -> Generator[Path]:
    """Processes that start meanwhile note the long turns of their loops in this file."""
    path = folder / "loop_notes.jsonl"
    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "LOOP_NOTES")}
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(WATCHED), kept["PYTHONPATH"]))),
        "LOOP_NOTES": str(path),
    }
    path.touch()
    try:
        yield path
    finally:
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def turns(path: Path, process: str, since: float) -> dict[str, Any]:
    """The long turns of a process's loop since a time."""
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    own = [note for note in notes if note["process"] == [process] and note["at"] >= since]
    longest = max(own, key=lambda note: note["cpu_ms"], default={"cpu_ms": 0.0, "gc_ms": 0.0})
    return {
        "longest, ms": round(longest["cpu_ms"], 1),
        "garbage collection in it, ms": round(longest["gc_ms"], 1),
        "longest without garbage collection, ms": round(
            max((note["cpu_ms"] - note["gc_ms"] for note in own), default=0.0), 1
        ),
        "turns over 20 ms": sum(note["cpu_ms"] > 20 for note in own),
    }


async def server_stalls(claims: int) -> dict[str, Any]:
    """The server's loop with very many claims: while they are made, and under `GET /fleet`."""
    found: dict[str, Any] = {"claims": claims}
    with tempfile.TemporaryDirectory() as name, noted(Path(name)) as notes:
        run_dir = Path(name)
        with interchange_server(run_dir) as (server, info):
            async with trainer_of(info) as trainer, told(trainer, run_dir):
                since = time.time()
                for _ in range(claims // BATCH):
                    await trainer.register(BATCH)
                await send_all(server.port, "/claim_episode", claim_bodies(claims), connections=64)
                found["while they are claimed"] = turns(notes, "server", since)
                since = time.time()
                costs: list[float] = []
                for _ in range(FLEETS):
                    cpu = server.cpu_s()
                    await read(server.port, "/fleet")
                    costs.append(1000 * (server.cpu_s() - cpu))
                found["GET /fleet, mean ms"] = round(statistics.mean(costs), 2)
                found["under GET /fleet"] = turns(notes, "server", since)
    return found


async def page_stalls(url: str, notes: Path, run: str, paths: list[str]) -> dict[str, Any]:
    """The page process's own loop, while four readers ask for everything and streams are open."""
    port = port_of(url)
    async with streams(port, run, STREAMS):
        since = time.time()
        for _ in range(3):
            await asyncio.gather(*(read(port, path) for path in paths for _ in range(4)))
    return turns(notes, "view", since)
