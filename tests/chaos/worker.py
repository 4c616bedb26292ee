"""A rollout machine: claims episodes with the product's client, holds three turns each, hands in the nonces.

    python tests/chaos/worker.py --run-dir DIR --server URL --name W

A model call is repeated as any careful agent repeats it: on connection errors, time-outs and 5xx. A 409 is
the end of the claim. Errors of the product's client end the process, and fail the run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx
from checker import reward_of
from evidence import WORKERS, Lines

from tinkerscript.client import AsyncTinkerScriptClient, Episode, Runner
from tinkerscript.client.runner import stopped_by_signals
from tinkerscript.client.settings import client_token
from tinkerscript.errors import ClaimLostError, NoEpisodeError
from tinkerscript.protocol import WorkflowOutput

NONCE = re.compile(r"[0-9a-f]{12}")
RETRY_S = 0.1
TURNS = 3
"""Of each episode."""

CONCURRENCY = 4
LEASE_S = 6.0


class Worker:
    def __init__(self, options: argparse.Namespace, model: httpx.AsyncClient) -> None:
        self._name: str = options.owner or options.name
        self._log = Lines(options.run_dir / WORKERS)
        self._model = model

    async def rollout(self, episode: Episode) -> WorkflowOutput:
        """The nonces of all turns in their order, and a reward that is made of them."""
        nonces: list[str] = []
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            text = f"[{self._name} {episode.episode_uuid} turn {turn}]"
            messages.append({"role": "user", "content": text})
            reply = await self._call(episode, messages)
            messages.append(reply)
            nonces.append(reply["content"])
            assert NONCE.fullmatch(nonces[-1]), reply
        return WorkflowOutput(reward=reward_of(nonces), metadata={"nonces": list(nonces)})

    async def _call(self, episode: Episode, messages: list[dict[str, Any]]) -> dict[str, Any]:
        while True:
            try:
                reply = await self._model.post(
                    f"{episode.openai_base_url}/chat/completions",
                    json={"model": "policy", "messages": messages},
                    headers={"Authorization": f"Bearer {episode.openai_api_key}"},
                )
            except httpx.TransportError:
                await asyncio.sleep(RETRY_S)
                continue
            if reply.status_code == 409:
                raise ClaimLostError(reply.text)
            if reply.status_code < 500:
                return reply.raise_for_status().json()["choices"][0]["message"]
            await asyncio.sleep(RETRY_S)

    async def loop(self, client: AsyncTinkerScriptClient) -> None:
        """Begin, run, end, one after the other, and write down each result that is confirmed."""
        while True:
            try:
                episode = await client.begin_episode(wait_s=5.0)
                output = await self.rollout(episode)
                await client.end_episode(episode, output)
            except (ClaimLostError, NoEpisodeError):
                continue
            self._log.write(
                episode=episode.episode_uuid,
                attempt=episode.attempt,
                client=self._name,
                reward=output.reward,
                nonces=output.metadata["nonces"],
            )


async def work(options: argparse.Namespace) -> None:
    async with (
        AsyncTinkerScriptClient(
            options.server,
            client_uuid=options.name,
            token=client_token(),
            timeout_s=None,
            allow_discard_timeout=LEASE_S,
        ) as client,
        httpx.AsyncClient(timeout=60) as model,
    ):
        worker = Worker(options, model)
        if options.runner:
            runner = Runner(worker.rollout, client=client, concurrency=CONCURRENCY, give_up_after_s=None)
            await stopped_by_signals(runner)
        else:
            await asyncio.gather(*(worker.loop(client) for _ in range(CONCURRENCY)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--owner", default="", help="who owns its claims, if that is not its name")
    parser.add_argument("--runner", action="store_true", help="use the client's Runner")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
