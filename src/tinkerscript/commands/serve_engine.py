from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import tinker
from rich.console import Console

from tinkerscript.config import EngineConfig, RunConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import hub_id_of, model_folder, model_name
from tinkerscript.tinker_api.state import WireLimits
from tinkerscript.train.backends.embedded_engine import EmbeddedSampler
from tinkerscript.train.defaults import usual_threads
from tinkerscript.trainer_link.keys import load_trainer_keys
from tinkerscript.trainer_link.trainer_end import TrainerLink


async def sample_for_server(
    checkpoint: str, link_address: str, *, device: str, dtype: str, link_keys: Path | None = None
) -> int:
    folder = model_folder(checkpoint, weights=True)
    threads = usual_threads(RunConfig(engine=EngineConfig(device=device)), folder)
    keys = None if link_keys is None else load_trainer_keys(link_keys)
    with EmbeddedEngine(
        folder, checkpoint_dir=folder.parent, threads=threads, device=device, dtype=dtype
    ) as engine:
        sampler = EmbeddedSampler(await engine.create_sampling_client())
        link = TrainerLink(
            link_address,
            trainer_id=uuid4().hex,
            model=model_name(folder),
            sampler=sampler.sample,
            keys=keys,
        )
        async with link:
            version = sampler.policy_version
            link.set_status(policy_version=version, global_step=0, engine_status="ENGINE.ROLLING")
            await asyncio.Event().wait()
    return 0


async def serve_tinker(
    checkpoint: str,
    console: Console,
    *,
    state_dir: Path,
    name: str,
    host: str,
    port: int,
    full: bool,
    threads: int,
    max_batch: int,
    max_runs: int,
    device: str,
    dtype: str,
    activation_checkpointing: bool,
) -> int:
    """Serve Tinker's wire protocol until cancelled.

    Without a `name`, the model is named after its folder, so that local clients find its tokenizer.
    """
    folder = model_folder(checkpoint, weights=True, note=console.print)
    folder = folder if hub_id_of(folder) else folder.resolve()
    wire_server = _wire_server()
    options = wire_server.WireOptions(
        folder=folder,
        state_dir=state_dir,
        name=name or str(folder),
        host=host,
        port=port,
        full=full,
        threads=threads,
        max_batch=max_batch,
        device=device,
        dtype=dtype,
        activation_checkpointing=activation_checkpointing,
        limits=WireLimits(runs=max_runs),
    )

    def announce(url: str) -> None:
        console.print(
            f"Tinker's protocol at {url}, model {options.name}\n"
            f"sessions and checkpoints in {options.state_dir}\n"
            f"use it  TINKER_BASE_URL={url} TINKER_API_KEY=tml-local python YOUR_PROGRAM.py",
            highlight=False,
            soft_wrap=True,
        )

    await wire_server.serve_wire(options, announce)
    return 0


def _wire_server() -> ModuleType:
    try:
        from tinkerscript.tinker_api import wire_server
    except ImportError as error:
        raise ConfigError(
            f"tinkerscript engine --port needs tinker 0.38 or later, and {tinker.__version__} is installed "
            f"({error}); run it in a separate environment: its clients may use any tinker from 0.24 on"
        ) from error
    return wire_server
