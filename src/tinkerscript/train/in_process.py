"""A run in one process (`enable_tinkerscript_mode: false`): server and worker are tasks of the trainer.

Invariant: they are the same server and the same worker, which talk over the same sockets, as in processes of
their own. So nothing works in one way only, and every client may join such a run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tinkerscript.access_tokens import CLIENT_TOKEN, read_token
from tinkerscript.addresses import ServerInfo
from tinkerscript.config import RunConfig
from tinkerscript.processes.children import remember_worker
from tinkerscript.server.process import running_server
from tinkerscript.trainer_link.trainer_end import TrainerLink
from tinkerscript.workers.worker import WorkerOptions, open_runner

Failed = Callable[[Exception], None]
"""Ends the run."""


@asynccontextmanager
async def server_here(config: RunConfig, folder: Path, failed: Failed) -> AsyncGenerator[ServerInfo]:
    """Serve the run in `folder` while the context is open. Raises ConfigError and StoreError."""
    async with running_server(config, folder, environ=os.environ) as (info, serving):
        serving.add_done_callback(lambda task: _report(task, failed))
        yield info


@asynccontextmanager
async def worker_here(
    config: RunConfig, folder: Path, link: TrainerLink, url: str, failed: Failed
) -> AsyncGenerator[None]:
    """Run episodes of the server at `url`, `workers.concurrency` at once, while the context is open.

    Raises WorkerError for a script or task that cannot be run.
    """
    workers, name = config.workers, f"{link.own_clients}0-0"
    tasks = [] if workers.script else config.all_tasks
    options = WorkerOptions(
        server_url=url,
        script=workers.script,
        tasks={task.name: task.train_args for task in tasks},
        eval_args={task.name: task.eval_args for task in tasks},
        sandboxes={task.name: task.sandbox for task in tasks},
        concurrency=workers.concurrency,
        client_uuid=name,
        allow_discard_timeout=workers.allow_discard_timeout,
        token=read_token(os.environ, CLIENT_TOKEN),
    )
    remember_worker(folder, name)
    async with open_runner(options) as runner:
        working = asyncio.create_task(runner.run(), name="worker")
        working.add_done_callback(lambda task: _report(task, failed))
        try:
            yield
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def _report(task: asyncio.Task[object], failed: Failed) -> None:
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        failed(error)
