"""An episode of the demo, as a script that takes little memory: fifty workers run it."""

from __future__ import annotations

import httpx

from tinkerscript.client import Episode


async def rollout(episode: Episode) -> float:
    sample = episode.payload["sample"]
    async with httpx.AsyncClient(base_url=f"{episode.openai_base_url}/", timeout=120) as client:
        reply = await client.post(
            "chat/completions",
            headers={"Authorization": f"Bearer {episode.openai_api_key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": sample["input"]}]},
        )
    text = reply.raise_for_status().json()["choices"][0]["message"]["content"] or ""
    return 1.0 if text.strip() == str(sample["target"]) else 0.0
