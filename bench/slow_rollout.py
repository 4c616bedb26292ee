"""Episodes that only wait, for `bench/stream.py`: how long, their uuid decides, and the law that
`SLOW_ROLLOUT` names, in seconds of the simulation.

    constant              1
    log_normal            median 1, and 30 at the 99th percentile
    limited               the same, and ended at 80
    bimodal               nine of ten 1, one of ten 60
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import statistics

import httpx

from tinkerscript.client import Episode

SETTINGS = os.environ.get("SLOW_ROLLOUT", "log_normal 0.1 0")
"""The law, seconds of the clock for each of the simulation, and the share of attempts that fail."""

HEAVY = math.log(30) / statistics.NormalDist().inv_cdf(0.99)
LIMIT = 80.0
CLIENT = httpx.AsyncClient(timeout=600)


def seconds_of(episode_uuid: str, law: str) -> float:
    """Of the simulation."""
    digest = hashlib.blake2b(episode_uuid.encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2**64
    if law == "constant":
        return 1.0
    if law in ("log_normal", "limited"):
        seconds = math.exp(HEAVY * statistics.NormalDist().inv_cdf(uniform))
        return min(seconds, LIMIT) if law == "limited" else seconds
    if law == "bimodal":
        return 60.0 if uniform > 0.9 else 1.0
    raise ValueError(f"no law {law!r}")


async def rollout(episode: Episode) -> float:
    law, scale, failing = SETTINGS.split()
    wait = seconds_of(episode.episode_uuid, law) * float(scale)
    await asyncio.sleep(wait / 2)
    reply = await CLIENT.post(
        f"{episode.openai_base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.openai_api_key}"},
        json={"model": "policy", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4},
    )
    reply.raise_for_status()
    await asyncio.sleep(wait / 2)
    if random.random() < float(failing):
        raise RuntimeError("a failure of the simulation")
    return random.random()
