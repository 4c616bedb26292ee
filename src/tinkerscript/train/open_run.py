"""The startup that all runs share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import ConfigError
from tinkerscript.ledger import is_here
from tinkerscript.ledger.history import History, RowWriter
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.logs import logged_to
from tinkerscript.processes.run_page import run_page
from tinkerscript.train.backends import open_backend, waited_for
from tinkerscript.train.backends.backend import TrainerBackend
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.run_status import RunStatus
from tinkerscript.trainer_link.messages import EpisodeAccepted


@dataclass(frozen=True, slots=True)
class OpenRun:
    config: RunConfig
    folder: RunFolder
    ledger: RowWriter
    reader: LedgerReader | None
    """Empty if the ledger is elsewhere; None if it is unreachable."""

    progress: ProgressReporter
    history: History
    replayed: Sequence[EpisodeAccepted] = ()

    @asynccontextmanager
    async def backend(self, model: Path) -> AsyncGenerator[TrainerBackend]:
        async with AsyncExitStack() as stack:
            opening = open_backend(
                self.config.engine,
                model,
                checkpoint_dir=self.folder.checkpoints,
                seed=self.config.seed,
                restore=self.folder.checkpoint_name(self.history.step) if self.history.checkpoint else None,
                note=self.progress.note,
            )
            with self.progress.waiting(waited_for(self.config.engine)):
                backend = await stack.enter_async_context(opening)
            yield backend

    @property
    def train_seconds(self) -> float:
        return self.history.checkpoint.train_seconds if self.history.checkpoint else 0.0


@asynccontextmanager
async def open_page(
    config: RunConfig,
    folder: RunFolder,
    progress: ProgressReporter,
    on_page: Callable[[str], object] | None,
    *,
    join: bool = False,
) -> AsyncGenerator[RunStatus]:
    """Serve the run's page, and copy its folder if that is a URL. `join`: a server already runs.

    Open it first, to show slow or failing steps.
    """
    status = RunStatus(progress)
    if join and on_page and not is_here(config.interchange_server.store, folder.path):
        status.note("watch the run on the server's machine, where its ledger is: tinkerscript view FOLDER")
        on_page = None
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(folder.copied(status.note))
        await stack.enter_async_context(run_page(config, folder.path, status.note, on_page))
        yield status


def begin_run(
    config: RunConfig,
    folder: RunFolder,
    status: RunStatus,
    *,
    ledger: RowWriter,
    history: History,
    replayed: Sequence[EpisodeAccepted] = (),
) -> OpenRun:
    status.write_into(ledger)
    folder.forget_metrics_after(history.step)
    for line in folder.set_aside_after(history.step, resumption=history.resumption):
        status.note(line)
    reader = None
    try:
        reader = LedgerReader(folder.path, store=config.interchange_server.store)
    except ConfigError as error:  # Perhaps only the server can reach its database.
        status.note(f"the run's health cannot be shown here: {error}")
    return OpenRun(config, folder, ledger, reader, status, history, replayed)


def logged(config: RunConfig, folder: RunFolder) -> AbstractContextManager[None]:
    log = folder.path / "logs" / "trainer.log"
    return logged_to(log, config.log_format, run=folder.path.name)
