"""An episode in two model calls under one base URL, with a wait between them until the file AFTER is there.

It blocks the worker's event loop, as programs do, and repeats calls for as long as a take-over lasts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from openai import OpenAI

from tinkerscript.client import Episode

BEFORE, AFTER = (Path(os.environ[name]) for name in ("BEFORE", "AFTER"))


def rollout(episode: Episode) -> float:
    key, url = episode.openai_api_key, episode.openai_base_url
    with OpenAI(base_url=url, api_key=key, max_retries=20) as client:
        ask(client)
        BEFORE.write_text(episode.openai_base_url)
        while not AFTER.exists():
            time.sleep(0.05)
        ask(client)
    return 1.0


def ask(client: OpenAI) -> None:
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
