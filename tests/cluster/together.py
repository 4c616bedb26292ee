"""Episodes that wait until as many workers have one as MEETING says: each leaves a file in its folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import rollout as demo

from tinkerscript.client import Episode

NUMBER, _, FOLDER = os.environ["MEETING"].partition(" ")


async def rollout(episode: Episode) -> float:
    Path(FOLDER, str(os.getpid())).touch()
    while len(os.listdir(FOLDER)) < int(NUMBER):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return await demo.rollout(episode)
