"""The record of a trainer elsewhere: what it costs a link, in bytes an episode and in waiting.

    python bench/mirror.py [--episodes 1500] [--tokens 200] [--seconds 8]

A real server, TCP on loopback with keys. Round trips of the link (a heartbeat and its answer, after what the
server has committed) are timed with nothing else on it, and in turn while the backlog of a record is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import numpy as np

from tinkerscript.config import RunConfig
from tinkerscript.record.entries import EpisodeDetail, RecordedEpisode, TrainedEpisode, TrainedSequence
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.server.process import running_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.train.record_sender import RecordSender
from tinkerscript.train.recorder import RunRecorder
from tinkerscript.trainer_link.keys import load_trainer_keys
from tinkerscript.trainer_link.trainer_end import TrainerLink

EPISODES_OF_A_STEP = 64
METRICS = 60
WORDS = (
    *("the", "of", "a", "sum", "agent", "tool", "answer", "is", "what", "more", "than", "one", "seven"),
    *("because", "looks", "right", "wrong", "again", "reading", "the", "file", "first", "then", "write"),
)
EVERY_S = 0.002
"""Between two round trips."""


def fill(writer: RecordWriter, episodes: int, tokens: int) -> None:
    """A run of `episodes` with `tokens` sampled tokens each."""
    random = np.random.default_rng(1)
    for number in range(episodes):
        step = 1 + number // EPISODES_OF_A_STEP
        words = " ".join(random.choice(WORDS, tokens // 2))
        call = Call(
            call_id=uuid4().hex,
            parent_id=None,
            new_prompt=pack_ids(random.integers(0, 150_000, 80).tolist()),
            sampled=pack_ids(random.integers(0, 150_000, tokens).tolist()),
            logprobs=pack_logprobs(-random.exponential(0.5, tokens)),
            policy_version=step,
            temperature=1.0,
            stop_reason="stop",
            messages=json.dumps([{"role": "user", "content": words[:300]}]),
            reply=json.dumps({"role": "assistant", "content": words}),
        )
        uuid = uuid4().hex
        writer.episode(
            RecordedEpisode(
                uuid=uuid,
                episode_type="train",
                step=step,
                group_id=f"step-{step}/sample-{number // 8}",
                status="accepted",
                reward=float(number % 2),
                ended=time.time(),
                detail=EpisodeDetail(calls=[call]),
            )
        )
        sequence = TrainedSequence(
            number=0,
            trainer_logprobs=pack_logprobs(-random.exponential(0.5, tokens)),
            entropies=random.exponential(0.5, tokens).astype("<f2").tobytes(),
            advantages=pack_logprobs([0.5]),
        )
        writer.trained(step, [TrainedEpisode(uuid=uuid, outcome="trained", sequences=[sequence])])
        if number % EPISODES_OF_A_STEP == 0:
            writer.metrics(step, {f"metric/{n}": float(random.normal()) for n in range(METRICS)})
            assert writer.flush()


async def round_trips(
    link: TrainerLink, seconds: float, done: asyncio.Task[None] | None = None
) -> list[float]:
    """Milliseconds, until `seconds` have passed or `done` is."""
    found: list[float] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not (done and done.done()):
        began = time.perf_counter()
        await link.flush()
        found.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(EVERY_S)
    return found


def summary(times: list[float]) -> str:
    ordered = sorted(times)
    return (
        f"median {statistics.median(ordered):6.2f} ms   95% {ordered[int(0.95 * len(ordered))]:6.2f} ms   "
        f"{len(ordered)} round trips"
    )


async def measure(folder: Path, episodes: int, tokens: int, seconds: float) -> list[str]:
    link_settings = {"interchange_method": "tcp", "link_encryption": "always", "interchange_server_port": 0}
    config = RunConfig.model_validate({"task": {"name": "none"}, "interchange_server": link_settings})
    there, here = folder / "server", folder / "trainer"
    there.mkdir()
    here.mkdir()
    (there / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    with RecordWriter(here / RECORD_FILE) as writer:
        writer.resume(0)
        fill(writer, episodes, tokens)
        recorder = RunRecorder(writer, "all")
        async with running_server(config, there, environ={}) as (info, _):
            link = TrainerLink(
                info.link_address,
                trainer_id=uuid4().hex,
                model="tiny",
                sampler=ScriptedSampler(lambda prompt: [1]).sample,
                keys=load_trainer_keys(Path(info.link_keys)),
            )
            async with link:
                await link.flush()
                before = await round_trips(link, seconds)
                sender = RecordSender(link, recorder, here / RECORD_FILE, limit_mb=0, note=print)
                sending = asyncio.create_task(sender.run())
                began = time.monotonic()
                during = await round_trips(link, 600, _until_sent(there, episodes, sending))
                took = time.monotonic() - began
                sender.finishing.set()
                await sending
                after = await round_trips(link, seconds)
    size = (here / RECORD_FILE).stat().st_size
    return [
        f"{episodes} episodes of {tokens} sampled tokens: {sender.bytes_sent / episodes:,.0f} bytes an "
        f"episode on the link, {sender.bytes_sent / episodes / tokens:.1f} a token; "
        f"{size / episodes:,.0f} in the file",
        f"sent in {took:.1f} s, {sender.bytes_sent / took / 1e6:.2f} MB/s",
        f"link without it   {summary(before + after)}",
        f"link meanwhile    {summary(during)}",
        f"ratio of medians {statistics.median(during) / statistics.median(before + after):.2f}",
    ]


def _until_sent(there: Path, episodes: int, sending: asyncio.Task[None]) -> asyncio.Task[None]:
    async def all_there() -> None:
        while not sending.done():
            await asyncio.sleep(0.2)
            if (there / RECORD_FILE).exists():
                record = Record(there)
                found = record.number("SELECT count(*) FROM trained")
                record.close()
                if found == episodes:
                    return

    return asyncio.create_task(all_there())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinkerscript-mirror-") as name:
        for line in asyncio.run(measure(Path(name), options.episodes, options.tokens, options.seconds)):
            print(line)


if __name__ == "__main__":
    main()
