"""`open_run`: what every kind of run opens first, and what its parts work with (`OpenRun`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.logs import logged_to
from tinkerscript.processes.run_page import run_page
from tinkerscript.train.backends import open_backend, waited_for
from tinkerscript.train.backends.backend import TrainerBackend
from tinkerscript.train.history import History, read_history
from tinkerscript.train.journal import AnyEvent, Journal
from tinkerscript.train.recorder import RunRecorder, recorded
from tinkerscript.train.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run whose folder is locked, and which is recorded."""

    config: RunConfig
    folder: RunFolder
    journal: Journal
    recorder: RunRecorder
    progress: ProgressReporter
    history: History
    """Where a resumed run continues; empty for a new one."""

    events: Sequence[AnyEvent] = ()
    """Of its journal so far."""

    @asynccontextmanager
    async def backend(self, model: Path) -> AsyncGenerator[TrainerBackend]:
        """What trains and samples, with the weights from which the run goes on. `model`: its folder."""
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
        """How long it has trained so far."""
        return self.history.checkpoint.train_seconds if self.history.checkpoint else 0.0


@asynccontextmanager
async def open_run(
    config: RunConfig, folder: RunFolder, progress: ProgressReporter, on_page: Callable[[str], object] | None
) -> AsyncGenerator[OpenRun]:
    """Log, record and copy the run in `folder` while the context is open, and start its page."""
    async with AsyncExitStack() as stack:
        log = folder.path / "logs" / "trainer.log"
        stack.enter_context(logged_to(log, config.log_format, run=folder.path.name))
        events = folder.events()
        history = read_history(events, exists=folder.has_checkpoint)
        kept = {plan.episode_uuid for plan in history.planned}
        recording = recorded(config, folder.path, progress, step=history.step, kept=kept)
        recorder, progress = stack.enter_context(recording)
        await stack.enter_async_context(folder.copied(progress.note))
        for damage in folder.passed_over(events, history.step):
            progress.note(damage)
        await stack.enter_async_context(run_page(config, folder.path, progress.note, on_page))
        durable = config.interchange_server.durability == "full"
        journal = Journal(folder.path / "journal.jsonl", durable=durable, run_id=folder.run_id)
        yield OpenRun(config, folder, stack.enter_context(journal), recorder, progress, history, events)
