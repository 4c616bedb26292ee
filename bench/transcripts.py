"""What a transcript costs an Inspect episode: bytes, packing, sending, storing, showing.

    python bench/transcripts.py [--episodes 20]

Packing is compared with the processor time of the episode itself, whose policy replies at once; sending with
the `/end_episode` that follows it, over one connection to a real server whose trainer commits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import httpx
from inspect_ai.log import EvalSample

from bridge import SAMPLE, Says, with_tools
from inspect_tinker_bridge import TaskRunner, load_inspect_task
from inspect_tinker_bridge.records import pack_transcript
from tinkerscript.config import RunConfig
from tinkerscript.ledger.compression import unpacked
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import TrainedRow, TranscriptRow, Use
from tinkerscript.page.transcript_view import parsed, transcript_view
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.server.process import running_server
from tinkerscript.trainer_link.messages import NewEpisode
from tinkerscript.trainer_link.trainer_end import TrainerLink

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from written_run import WrittenRun

TURNS = (3, 30, 100)
LIMIT = 2**20


def median_ms(work: Callable[[], object], times: int) -> float:
    """Processor time of `work` in milliseconds."""
    found: list[float] = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(1000 * (time.process_time() - start))
    return statistics.median(found)


async def episodes(turns: int, number: int) -> tuple[EvalSample, float]:
    """Inspect's record of an episode, and the median processor time of one in milliseconds."""
    found: list[EvalSample] = []
    spent: list[float] = []
    async with TaskRunner(load_inspect_task(with_tools)) as runner:
        for _ in range(number):
            start = time.process_time()
            await runner.run(SAMPLE, Says(turns), on_record=found.append)
            spent.append(1000 * (time.process_time() - start))
    return found[-1], statistics.median(spent)


async def sending(transcript: bytes, number: int) -> tuple[float, float]:
    """Median milliseconds of `/record_transcript` and of `/end_episode`."""
    config = RunConfig.model_validate(
        {"task": {"name": "none"}, "interchange_server": {"interchange_server_port": 0}}
    )

    async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise RuntimeError("no episode of this benchmark calls the model")

    async def use(link: TrainerLink) -> None:
        while True:
            outcomes = await link.outcomes()
            link.note([TrainedRow(episode=each.sequence, step=0, outcome=Use.EVALUATED) for each in outcomes])

    took: dict[str, list[float]] = {"/record_transcript": [], "/end_episode": []}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_server(config, Path(folder), environ={}) as (info, _),
            TrainerLink(info.link_address, trainer_id=uuid4().hex, model="none", sampler=sample) as link,
            httpx.AsyncClient(base_url=info.url) as http,
        ):
            await link.resume([])
            names = [uuid4().hex for _ in range(number)]
            await link.register(
                [NewEpisode(episode_uuid=n, episode_type="train", group_id="g", payload=b"{}") for n in names]
            )
            using = asyncio.create_task(use(link))
            for _ in names:
                claim = (
                    await http.post("/claim_episode", json={"client_uuid": "c", "sends_key": True})
                ).json()
                headers = {"authorization": f"Bearer {claim['openai_api_key']}"}
                for path, body in (
                    ("/record_transcript", {"content": transcript}),
                    ("/end_episode", {"json": {"workflow_output": {"reward": 1.0}}}),
                ):
                    start = time.perf_counter()
                    reply = await http.post(path, headers=headers, **body)
                    took[path].append(1000 * (time.perf_counter() - start))
                    reply.raise_for_status()
            using.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await using
    return statistics.median(took["/record_transcript"]), statistics.median(took["/end_episode"])


def showing(transcript: bytes) -> tuple[float, float]:
    """Milliseconds of processor time: to read it for Inspect's viewer, and the first page of its events."""
    with tempfile.TemporaryDirectory() as folder:
        with WrittenRun(Path(folder)) as run:
            run.put(TranscriptRow(episode=run.episode("e"), attempt=1, transcript=transcript))
        ledger = LedgerReader(Path(folder))
        read = median_ms(lambda: parsed(unpacked(transcript)), 9)
        return read, median_ms(lambda: transcript_view(ledger, "e"), 9)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20)
    number = parser.parse_args().episodes
    print(
        "turns   JSON kB   sent kB   pack ms   of the episode   send ms   of /end_episode   read ms   page ms"
    )
    for turns in TURNS:
        record, episode_ms = await episodes(turns, number if turns < 50 else max(3, number // 4))
        transcript = pack_transcript(record, LIMIT)
        pack_ms = median_ms(lambda record=record: pack_transcript(record, LIMIT), 9)
        send_ms, end_ms = await sending(transcript, 10 * number)
        read_ms, page_ms = showing(transcript)
        print(
            f"{turns:5}   {len(unpacked(transcript)) / 1000:7.1f}   {len(transcript) / 1000:7.1f}   "
            f"{pack_ms:7.2f}   {100 * pack_ms / episode_ms:12.1f} %   {send_ms:7.2f}   "
            f"{send_ms / end_ms:15.2f}   {read_ms:7.2f}   {page_ms:7.2f}"
        )


if __name__ == "__main__":
    asyncio.run(main())
