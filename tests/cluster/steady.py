"""An episode of the demo in two turns. A model call is made again while its server is away.

It takes about the seconds that THINK says, until the file that RELEASE names is there.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import httpx

from tinkerscript.client import Episode
from tinkerscript.errors import ClaimLostError

THINK_S, RELEASE = float(os.environ["THINK"]), Path(os.environ["RELEASE"])


async def rollout(episode: Episode) -> float:
    sample = episode.payload["sample"]
    messages = [{"role": "user", "content": sample["input"]}]
    headers = {"Authorization": f"Bearer {episode.openai_api_key}"}
    async with httpx.AsyncClient(
        base_url=f"{episode.openai_base_url}/", headers=headers, timeout=120
    ) as client:
        await _call(client, messages)
        if not RELEASE.exists():
            await asyncio.sleep(random.uniform(0.5, 1.5) * THINK_S)
        text = await _call(client, messages)
    return 1.0 if text.strip() == str(sample["target"]) else 0.0


async def _call(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
    while True:
        try:
            reply = await client.post("chat/completions", json={"model": "policy", "messages": messages})
        except httpx.TransportError:
            reply = None
        if reply is None or reply.status_code in (429, 502, 503, 504):
            await asyncio.sleep(0.2)
            continue
        if reply.status_code == 409:
            raise ClaimLostError(reply.text)
        return reply.raise_for_status().json()["choices"][0]["message"]["content"] or ""
