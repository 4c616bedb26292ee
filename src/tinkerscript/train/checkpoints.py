"""`RunCheckpoints`: all weights of a run on disk, and their rows in the ledger.

A checkpoint counts once its manifest is written and its row committed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from tinkerscript.ledger.rows import CheckpointRow
from tinkerscript.train.curriculum import Curriculum
from tinkerscript.train.learner import Learner
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.policy import Policy

# Without a server, the commit never returns.
LAST_COMMIT_S = 10.0

logger = logging.getLogger(__name__)


class RunCheckpoints:
    def __init__(
        self,
        parts: OpenRun,
        learners: Sequence[Learner],
        policy: Policy,
        needed: Callable[[Collection[int]], Collection[int]],
        curriculum: Curriculum | None = None,
    ) -> None:
        """`learners` begin with the run's own policy. `needed` picks the checkpoints to keep."""
        self._parts = parts
        self._own, *self._roles = learners
        self._policy = policy
        self._needed = needed
        self._curriculum = curriculum
        self._saved = parts.history.step

    async def after(self, step: int, *, train_seconds: float, is_needed: bool) -> None:
        training = self._parts.config.training
        is_due = training.checkpoint_every and step % training.checkpoint_every == 0
        if is_due or is_needed or step == training.steps:
            await self.save(step, train_seconds=train_seconds)

    async def last(self, step: int, *, train_seconds: float) -> None:
        if step > self._saved:
            saving = self.save(step, train_seconds=train_seconds, within_s=LAST_COMMIT_S)
            await try_to_save(saving, step, self._parts.progress.note)

    async def save(self, step: int, *, train_seconds: float, within_s: float | None = None) -> None:
        """Raises TimeoutError after `within_s`."""
        with self._parts.progress.waiting(f"the checkpoint of step {step}"):
            await self.write(self._parts.folder.checkpoint_name(step))
        roles = {each.role: each.report.as_json() for each in self._roles}
        learners = {each.role: each.state for each in (self._own, *self._roles)}
        row = CheckpointRow(
            step=step,
            time=time.time(),
            policy_version=self._policy.version,
            train_seconds=train_seconds,
            report=msgspec.json.encode(self._own.report.as_json()),
            role_reports=msgspec.json.encode(roles),
            curriculum=self._curriculum.state() if self._curriculum else b"{}",
            learners=msgspec.json.encode(learners),
        )
        async with asyncio.timeout(within_s):
            await self._parts.ledger.commit([row])
        self._saved = step
        self.delete_old()

    def delete_old(self) -> None:
        folder = self._parts.folder
        folder.checkpointed(needed=self._needed(folder.whole_checkpoints()))

    async def write(self, name: str) -> None:
        for each in (*self._roles, self._own):
            await each.client.save_state(name)
        await asyncio.to_thread(self._parts.folder.seal, name)


async def try_to_save(saving: Awaitable[None], step: int, note: Callable[[str], None]) -> None:
    try:
        await saving
    except Exception as error:
        logger.warning("checkpoint.not_saved step=%d", step, exc_info=True)
        note(f"step {step} has no checkpoint: {type(error).__name__}: {error}")
