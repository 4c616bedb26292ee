"""What a long run asks of its ledger: the commit of a large step, and a trainer that resumes after much.

    python bench/ledger.py [--calls N] [--ended N]

`commit`: a step whose episodes hold `--calls` model calls in all, ten each, is read from the link, and its
rows and what they change of the episodes are committed, as the server does it. `loop_s` is the processor time
of the event loop's thread, which everything else waits for; a transaction of this size is written in another
one. `resume`: a real server process starts with a ledger of `--ended` episodes that ended and were trained
on, one call each, and a trainer resumes from its last checkpoint. Seconds are those of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import astuple

from interchange import PAYLOAD, interchange_server
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.ledger import call_row
from tinkerscript.ledger.rows import (
    AttemptRow,
    CheckpointRow,
    EpisodeRow,
    PublicationRow,
    ResultRow,
    ResumptionRow,
    Row,
    SampleRow,
    StepRow,
    TrainedRow,
    Use,
    columns,
)
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.trainer_messages import LastCommit, TrainerMessageHandler
from tinkerscript.trainer_link.framing import LinkTimes, frames, read_to_server
from tinkerscript.trainer_link.messages import Commit
from tinkerscript.trainer_link.trainer_end import TrainerLink

ROUNDS = 5
CALLS_OF_EPISODE = 10
GROUP_SIZE = 8
STEP_EPISODES = 512
CHECKPOINT_EVERY = 10
CALL = Call(
    call_id="0" * 32,
    parent_id=None,
    new_prompt=pack_ids([1] * 200),
    sampled=pack_ids([2] * 200),
    logprobs=pack_logprobs([-0.5] * 200),
    stop_reason="stop",
    policy_version=0,
)
RESULT = json.dumps({"reward": 1.0, "metadata": {"answer": "46"}}).encode()


class NoLink:
    """In place of the link's server end: nobody is told anything."""

    trainer_id = "t"

    def send(self, message: object) -> None:
        """Nobody listens."""


async def committed(folder: Path, episodes: int) -> tuple[float, float]:
    """Seconds of the commit of one step: of the event loop's thread, and until it is durable."""
    ledger = SqliteLedger(folder / LEDGER_FILE)
    book = EpisodeBook(clock=time.monotonic, max_attempts=3)
    metrics = ServerMetrics(book)
    interchange = Interchange(book=book, ledger=ledger, metrics=metrics, forget=(), clock=time.monotonic)
    link: Any = NoLink()
    handler = TrainerMessageHandler(
        interchange=interchange,
        ledger=ledger,
        link=link,
        sampler=link,
        metrics=metrics,
        times=LinkTimes(),
        last_commit=LastCommit(),
        storage=StorageLimit(ledger, 0),
    )
    rows: list[Any] = [
        StepRow(step=1, time=0.0, policy_version=1),
        PublicationRow(policy_version=1, step=1, time=0.0),
    ]
    for number in range(episodes):
        book.register(f"e{number}", "train", f"g{number // GROUP_SIZE}", PAYLOAD, step=1)
        episode = book.claim("c", "train", 600.0)
        assert episode is not None
        interchange.settle()
        for _ in range(CALLS_OF_EPISODE):
            ledger.put_call(episode.sequence, 1, CALL)
        book.end(episode.uuid, 1, reward=1.0, result=RESULT)
        place = number // GROUP_SIZE
        rows.append(TrainedRow(episode=episode.sequence, step=1, outcome=Use.TRAINED, place=place))
        if not number % 50:
            await interchange.commit()
    await interchange.commit()
    (frame,) = frames([Commit(number=1, rows=rows)])
    began, cpu = time.perf_counter(), time.thread_time()
    (message,) = read_to_server(frame)
    assert isinstance(message, Commit)
    handler.handle(message)
    await ledger.durable()
    taken = time.thread_time() - cpu, time.perf_counter() - began
    assert await ledger.read("SELECT count(*) FROM trained") == [(episodes,)]
    await ledger.close()
    return taken


async def commits(calls: int) -> dict[str, Any]:
    found = list[tuple[float, float]]()
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            found.append(await committed(Path(folder), calls // CALLS_OF_EPISODE))
    loop_s, seconds = ([each[place] for each in found] for place in (0, 1))
    return {
        "commit": f"{calls // CALLS_OF_EPISODE} episodes, {calls} calls",
        "loop_s": round(statistics.median(loop_s), 4),
        "loop_slowest_s": round(max(loop_s), 4),
        "seconds": round(statistics.median(seconds), 4),
    }


def a_long_past(episodes: int) -> Iterator[Row]:
    """The rows of a run that trained on so many episodes."""
    sample, steps = b"s" * 16, -(-episodes // STEP_EPISODES)
    call = call_row(1, 1, CALL)
    yield SampleRow(digest=sample, payload=PAYLOAD)
    yield ResumptionRow(resumption=1, step=0, time=0.0)
    yield PublicationRow(policy_version=0, step=0, time=0.0)
    for number in range(1, episodes + 1):
        step, group = 1 + (number - 1) // STEP_EPISODES, (number - 1) // GROUP_SIZE
        yield EpisodeRow(
            sequence=number,
            uuid=f"{number:032x}",
            episode_type="train",
            group_id=f"g{group}",
            pool="",
            group_size=GROUP_SIZE,
            step=step,
            position=group,
            sample=sample,
            digest=sample,
            state="ended",
            reward=1.0,
            result_digest=sample,
            end_number=number,
            ended_at=float(number),
            consumed=1,
        )
        yield AttemptRow(
            episode=number,
            attempt=1,
            client=f"worker-{number % 100}",
            request_id=f"{number:032x}",
            claimed_at=float(number),
            policy_version=step - 1,
            lease_s=600.0,
        )
        yield msgspec.structs.replace(call, episode=number)
        yield ResultRow(episode=number, result=RESULT)
        yield TrainedRow(
            episode=number, step=step, outcome=Use.TRAINED, place=group % (STEP_EPISODES // GROUP_SIZE)
        )
    for step in range(1, steps + 1):
        yield StepRow(step=step, time=float(step), policy_version=step)
        yield PublicationRow(policy_version=step, step=step, time=float(step))
        if step % CHECKPOINT_EVERY == 0 or step == steps:
            yield CheckpointRow(step=step, time=float(step), policy_version=step, train_seconds=1.0)


def write(path: Path, rows: Iterable[Row]) -> None:
    """All rows in one transaction, with nothing between them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as ledger:
        ledger.execute("PRAGMA synchronous = OFF")
        ledger.execute("BEGIN")
        for row in rows:
            names = columns(type(row))
            marks = ", ".join("?" * len(names))
            ledger.execute(f"INSERT INTO {row.TABLE} ({', '.join(names)}) VALUES ({marks})", astuple(row))
        ledger.execute("COMMIT")


async def resumed(episodes: int) -> dict[str, Any]:
    async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise RuntimeError("nobody calls the model here")

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        await SqliteLedger(run_dir / LEDGER_FILE).close()
        write(run_dir / LEDGER_FILE, a_long_past(episodes))
        size = (run_dir / LEDGER_FILE).stat().st_size
        began = time.perf_counter()
        with interchange_server(run_dir) as (server, info):
            started = time.perf_counter() - began
            async with TrainerLink(
                info.link_address, trainer_id=uuid4().hex, model="none", sampler=sample
            ) as link:
                await link.flush()
                began, cpu = time.perf_counter(), server.cpu_s()
                history = await link.resume([-(-episodes // STEP_EPISODES)], replay_lag=1)
                taken = time.perf_counter() - began
                assert history.step == -(-episodes // STEP_EPISODES)
            return {
                "resume": f"{episodes} ended episodes",
                "ledger_gb": round(size / 1e9, 2),
                "server_starts_s": round(started, 2),
                "trainer_resumes_s": round(taken, 2),
                "server_cpu_s": round(server.cpu_s() - cpu, 2),
                "server_mb": round(server.memory_bytes() / 1e6),
                "bench_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            }


async def bench(options: argparse.Namespace) -> None:
    print(json.dumps(await commits(options.calls)), flush=True)
    print(json.dumps(await resumed(options.ended)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--ended", type=int, default=1_000_000)
    asyncio.run(bench(parser.parse_args()))


if __name__ == "__main__":
    main()
