"""An agent: any program that calls an OpenAI-compatible endpoint. It replaces the task's solver and scorer.

tinkerscript train train.yaml --set workers.script=agent.py

A machine that only runs it needs `pip install tinkerscript openai`: the client, and this file's imports.
"""

import re

from openai import OpenAI

from tinkerscript.client import Episode


def rollout(episode: Episode) -> float:
    """Run one episode; returns its reward. An exception is recorded, and the episode is tried again."""
    sample = episode.payload["sample"]
    assert isinstance(sample, dict)
    with OpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as client:
        completion = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": str(sample["input"])}]
        )
    numbers = re.findall(r"\d+", completion.choices[0].message.content or "")
    return 1.0 if numbers[-1:] == [sample["target"]] else 0.0
