"""A rollout whose tool is slow: a model call, a wait of SLOW_ROLLOUT_S seconds, another model call.

What the tool returns is 250 words that no other episode gets, so a step has much to train on.
"""

from __future__ import annotations

import asyncio
import os
import random

import httpx

from tinkerscript.client import Episode

WAIT_S = float(os.environ.get("SLOW_ROLLOUT_S", "5"))
CLIENT = httpx.AsyncClient(timeout=120)


async def ask(episode: Episode, messages: list[dict[str, str]]) -> str:
    reply = await CLIENT.post(
        f"{episode.openai_base_url}/chat/completions",
        headers={"Authorization": f"Bearer {episode.openai_api_key}"},
        json={"model": "policy", "messages": messages, "max_tokens": 8},
    )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"] or ""


async def rollout(episode: Episode) -> float:
    messages = [{"role": "user", "content": episode.payload["sample"]["input"]}]
    messages.append({"role": "assistant", "content": await ask(episode, messages)})
    await asyncio.sleep(WAIT_S)
    found = " ".join(str(random.randrange(10)) for _ in range(250))
    messages.append({"role": "user", "content": found})
    await ask(episode, messages)
    return random.random()
