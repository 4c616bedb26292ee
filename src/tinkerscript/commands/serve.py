from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
from rich.console import Console

from tinkerscript.access_tokens import CLIENT_TOKEN, read_token
from tinkerscript.addresses import moved_to
from tinkerscript.config import (
    RUNS,
    Dtype,
    EngineConfig,
    InterchangeConfig,
    Port,
    RunConfig,
    SamplingConfig,
    dump_config,
    load_config,
)
from tinkerscript.dashboard.terminal import print_wrapped
from tinkerscript.errors import ConfigError
from tinkerscript.files import resolve_link, write_atomically
from tinkerscript.ledger import is_shared
from tinkerscript.model_folder import context_of, model_folder, model_name, pinned_model
from tinkerscript.processes.children import (
    ServerAddress,
    engine_child,
    server_address,
    worker_command,
)
from tinkerscript.processes.launcher import MAX_RESTARTS
from tinkerscript.processes.planned import server_process
from tinkerscript.processes.supervisor import Supervisor
from tinkerscript.train.identity import check_unused, check_whole, identify, link_as_latest

READY_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    address: ServerAddress
    supervisor: Supervisor


def served_config(engine: EngineConfig, folder: Path, host: str, port: Port) -> RunConfig:
    """Make a config in which only the context length limits replies."""
    return RunConfig(
        engine=engine.model_copy(update={"model": str(folder.absolute())}),
        interchange_server=InterchangeConfig(interchange_server_host=host, interchange_server_port=port),
        sampling=SamplingConfig(max_tokens=context_of(folder)),
    )


@asynccontextmanager
async def served_checkpoint(
    engine: EngineConfig, host: str, port: Port, note: Callable[[str], None]
) -> AsyncGenerator[Served]:
    """Run a model's server and engine as supervised children. The block starts once they answer.

    Of `engine` only model, device and dtype count.
    """
    folder = model_folder(engine.model, weights=True, note=note)
    config = served_config(engine, folder, host, port)
    with tempfile.TemporaryDirectory(prefix="tinkerscript-serve-") as name:
        run_dir = Path(name)
        (run_dir / "logs").mkdir()
        (run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        async with Supervisor(max_restarts=MAX_RESTARTS, note=note) as supervisor:
            server = server_process(run_dir, serve_model=True).child(run_dir)
            await supervisor.start(server)
            address = await server_address(run_dir, server, supervisor)
            await supervisor.start(engine_child(config.engine, address, run_dir))
            await _until_it_samples(address, supervisor)
            yield Served(model_name(folder), address, supervisor)


async def _until_it_samples(address: ServerAddress, supervisor: Supervisor) -> None:
    token = read_token(os.environ, CLIENT_TOKEN)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    watch = asyncio.create_task(supervisor.failed())
    try:
        async with httpx.AsyncClient(base_url=address.url, headers=headers, trust_env=False) as http:
            while not watch.done():
                with suppress(httpx.TransportError):  # The server is restarting.
                    reply = await http.get("/get_engine_status")
                    if reply.is_success and reply.json()["engine_status"] == "ENGINE.ROLLING":
                        return
                await asyncio.wait({watch}, timeout=READY_POLL_S)
        await watch
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def serve_checkpoint(
    checkpoint: str, host: str, port: Port, console: Console, *, device: str = "cpu", dtype: Dtype = "float32"
) -> int:
    engine = EngineConfig(model=checkpoint, device=device, dtype=dtype)
    async with served_checkpoint(engine, host, port, console.print) as served:
        open_to_all = read_token(os.environ, CLIENT_TOKEN) is None
        key = "any API key will do" if open_to_all else f"the API key is {CLIENT_TOKEN}"
        text = f"serving {served.name!r} at {served.address.url}/v1 ({key})"
        console.print(text, highlight=False, soft_wrap=True, markup=False)
        await served.supervisor.failed()
    return 0


async def serve_run(
    path: Path | None, resume: Path | None, console: Console, overrides: list[str] | None = None
) -> int:
    if (path is None) == (resume is None):
        raise ConfigError("give exactly one of CONFIG, --resume RUN_DIR and --checkpoint DIR")
    resume = resume and resolve_link(resume)
    config = load_config(path or (resume or Path()) / "config.yaml", overrides)
    if config.method == "sft":
        raise ConfigError("method: sft has no episodes to serve; train with `tinkerscript train`")
    if resume is None:
        pinned = pinned_model(config.engine.model, note=console.print)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": pinned})})
    folder = resume or config.new_folder(datetime.now())
    if resume is None:
        check_unused(folder)
    else:
        check_whole(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    identify(folder)
    if folder.parent.resolve() == RUNS.resolve():  # A service's working directory may be read-only.
        link_as_latest(folder)
    if resume is None or overrides:
        write_atomically(folder / "config.yaml", dump_config(config))
    async with Supervisor(max_restarts=MAX_RESTARTS, note=console.print) as supervisor:
        server = server_process(folder, log_format=config.log_format).child(folder)
        await supervisor.start(server)
        patience_s = 0.0 if _trains(config) else config.inference.start_timeout_s
        if is_shared(config.interchange_server.store):
            patience_s = math.inf
            log = folder / "logs" / "server.log"
            console.print(f"waiting until no other server serves {folder} (log: {log})", soft_wrap=True)
        address = await server_address(folder, server, supervisor, patience_s=patience_s)
        print_wrapped(console, _greeting(config, folder, address))
        await supervisor.failed()
    return 0


def _trains(config: RunConfig) -> bool:
    return not config.inference.samples_without_trainer


def _greeting(config: RunConfig, folder: Path, address: ServerAddress) -> str:
    sampler = [
        f"train with it    tinkerscript train CONFIG --join {folder}",
        "or let it train  POST /sync_train_config, then /start_engine",
    ]
    if not _trains(config):
        inference = config.inference
        sampler = [
            f"samples from     {inference.backend} at {inference.base_url}; "
            f"log: {folder / 'logs' / 'server.log'}"
        ]
    return "\n".join(
        [
            f"interchange server at {address.url}, run folder {folder}"
            + moved_to(config.interchange_server, address.url),
            *sampler,
            f"run episodes     {worker_command(config, address.url)}",
        ]
    )
