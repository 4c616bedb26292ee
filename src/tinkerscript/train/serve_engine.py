"""`tinkerscript engine`: sampling for a server over its link, in the trainer's place."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from uuid import uuid4

from tinkerscript.config import model_folder
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.server.link_keys import load_trainer_keys
from tinkerscript.server.trainer_link import TrainerLink
from tinkerscript.train.engine_sampler import sample_from


async def serve_engine(
    checkpoint: Path, link_address: str, *, link_keys: Path | None = None, exit_with_parent: bool
) -> int:
    """Sample from a checkpoint for the server behind `link_address`, until cancelled.

    `link_keys` is the folder of the link's keys, if it has some. Raises ConfigError.
    """
    folder = model_folder(str(checkpoint))
    keys = None if link_keys is None else load_trainer_keys(link_keys)
    with EmbeddedEngine(folder, checkpoint_dir=folder.parent) as engine:
        client = await engine.create_sampling_client()
        link = TrainerLink(
            link_address,
            trainer_id=uuid4().hex,
            model=folder.name,
            sampler=partial(sample_from, client, 0),
            keys=keys,
        )
        async with link:
            link.set_status(policy_version=0, global_step=0, engine_status="ENGINE.ROLLING")
            await (_parent_gone() if exit_with_parent else asyncio.Event().wait())
    return 0


async def _parent_gone() -> None:
    """Return when standard input, a pipe from the parent, reaches its end."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while await reader.read(4096):
        pass
