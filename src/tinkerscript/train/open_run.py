"""What every kind of run opens first (`open_record`), and what its parts work with (`OpenRun`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.ledger.history import History, RowWriter
from tinkerscript.logs import logged_to
from tinkerscript.processes.run_page import run_page
from tinkerscript.train.backends import open_backend, waited_for
from tinkerscript.train.backends.backend import TrainerBackend
from tinkerscript.train.recorder import RunRecorder, recorded
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.trainer_link.messages import EpisodeAccepted


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run whose folder is locked, and which is recorded."""

    config: RunConfig
    folder: RunFolder
    ledger: RowWriter
    recorder: RunRecorder
    progress: ProgressReporter
    history: History
    """Where a resumed run continues; empty for a new one."""

    replayed: Sequence[EpisodeAccepted] = ()
    """Those of `history.replayed`, with their calls."""

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
async def open_record(
    config: RunConfig,
    folder: RunFolder,
    progress: ProgressReporter,
    on_page: Callable[[str], object] | None,
) -> AsyncGenerator[tuple[RunRecorder, ProgressReporter]]:
    """Record and copy the run in `folder` while the context is open, and start its page: before anything
    that may have to be waited for, or fail."""
    async with AsyncExitStack() as stack:
        recorder, progress = stack.enter_context(recorded(config, folder.path, progress))
        await stack.enter_async_context(folder.copied(progress.note))
        await stack.enter_async_context(run_page(config, folder.path, progress.note, on_page))
        yield recorder, progress


def begin_run(
    config: RunConfig,
    folder: RunFolder,
    recorder: RunRecorder,
    progress: ProgressReporter,
    *,
    ledger: RowWriter,
    history: History,
    replayed: Sequence[EpisodeAccepted] = (),
) -> OpenRun:
    """The run goes on where `history` says."""
    recorder.resume(history.step, kept={plan.episode_uuid for plan in history.planned})
    folder.forget_metrics_after(history.step)
    for damage in folder.passed_over(history.step):
        progress.note(damage)
    return OpenRun(config, folder, ledger, recorder, progress, history, replayed)


def logged(config: RunConfig, folder: RunFolder) -> AbstractContextManager[None]:
    """Write the trainer's log while the context is open."""
    log = folder.path / "logs" / "trainer.log"
    return logged_to(log, config.log_format, run=folder.path.name)
