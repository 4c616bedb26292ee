"""Many clients in one process: each begins and ends episodes until there are none.

    python tests/chaos/crowd.py --run-dir DIR --server URL --clients N --first K --log NAME

Any error that a client's caller sees ends the process, and fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from evidence import Lines

from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.errors import NoEpisodeError

CROWD = "crowd.jsonl"
"""One line a client: how many episodes it ended."""


async def one_client(url: str, number: int, log: Lines) -> None:
    ended, slowest_s = 0, 0.0
    async with AsyncTinkerScriptClient(url, client_uuid=f"client-{number}") as client:
        while True:
            began = time.perf_counter()
            try:
                episode = await client.begin_episode(wait_s=5)
            except NoEpisodeError:
                break
            await client.end_episode(episode, 1.0, metadata={"name": episode.payload["name"]})
            slowest_s = max(slowest_s, time.perf_counter() - began)
            ended += 1
    log.write(client=number, ended=ended, slowest_s=slowest_s)


async def crowd(options: argparse.Namespace) -> None:
    log = Lines(options.run_dir / CROWD)
    numbers = range(options.first, options.first + options.clients)
    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(one_client(options.server, number, log))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    asyncio.run(crowd(parser.parse_args()))


if __name__ == "__main__":
    main()
