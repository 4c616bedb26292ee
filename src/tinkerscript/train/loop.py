"""The training loop, top to bottom: evaluate; for every step take groups, learn, publish; evaluate again.

This is Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300): an episode's advantage is its
reward compared with its group's.

    GroupStream     which groups start, and which train      stream.py
    PolicyUpdate    what a step does to the weights          update.py, learner.py
    Policy          the versions that sample                 policy.py
    RunCheckpoints  weights on disk                          checkpoints.py
    Evaluator       scores on held-out samples               evaluation.py
    StepLog         what people see of a step                step_log.py

Invariant: with its ledger and checkpoints, a run can be cancelled at any point and resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from tinkerscript.train.backends.backend import STEP_GRACE_S, finish_despite_cancel
from tinkerscript.train.checkpoints import RunCheckpoints
from tinkerscript.train.collector import Collector
from tinkerscript.train.episode_source import EpisodeSource
from tinkerscript.train.evaluation import Evaluator
from tinkerscript.train.group_judge import GroupJudge
from tinkerscript.train.learner import Learner
from tinkerscript.train.off_policy import PolicyLags
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.policy import Policy
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_log import StepLog
from tinkerscript.train.step_metrics import StepMetric
from tinkerscript.train.stream import GroupStream, TrainingStep
from tinkerscript.train.update import PolicyUpdate


class TrainingLoop:
    def __init__(
        self,
        parts: OpenRun,
        samples: TaskSamples | None,
        source: EpisodeSource,
        policy: Policy,
        learners: Sequence[Learner],
        extra_metrics: Sequence[StepMetric] = (),
        judge: GroupJudge | None = None,
        *,
        restore: Callable[[int], Awaitable[None]] | None = None,
        renew: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`learners` begin with the run's own policy. `samples`: None if clients register their own.

        `restore` loads a step's checkpoint, for its interrupted evaluations. `renew` makes it the reference
        of the KL divergences.
        """
        training, progress = parts.config.training, parts.progress
        self.parts = parts
        self.step = parts.history.step
        self.train_seconds = parts.train_seconds
        self._steps, self._source, self.policy = training.steps, source, policy
        self._restore, self._renew = restore, renew
        self._lags = PolicyLags(
            training,
            parts.history.versions,
            max_lag=parts.config.max_policy_lag,
            keeps_stale=samples is not None and training.on_stale == "drop",
        )
        self._collector = Collector(
            source,
            progress,
            group_size=training.group_size,
            client_samples=samples is None,
            seen=policy.note,
            slots=parts.config.slots,
            scores=training.reward_weights.keys(),
            check_for_teacher=teacher.check if (teacher := learners[0].distillation) else None,
            judge=judge,
        )
        self._stream = GroupStream(source, self._collector, progress, training, samples, self._lags)
        self.log = StepLog(parts, samples, learners, extra_metrics)
        self._update = PolicyUpdate(parts, learners, self._lags, self.log)
        roles = [each.role for each in learners[1:]]
        self.evaluator = Evaluator(parts, samples, self._collector, policy, roles)
        curriculum = samples.curriculum if samples else None
        self.checkpoints = RunCheckpoints(parts, learners, policy, self._needed, curriculum)

        self._referred = 0

        # Weights, ledger and published version may disagree, so a checkpoint would be wrong.
        self._mid_step = False

    async def run(self) -> None:
        """Run or resume. Saves the last step unless the run ends within one."""
        self._stream.restore(self.parts.history)
        beside = [asyncio.create_task(self._collector.run(), name="receive outcomes")]
        try:
            await self._begin()
            beside.append(asyncio.create_task(self.evaluator.run(), name="evaluate"))
            await self._train()
            self._stream.end()
            with self.parts.progress.waiting("the last episodes to end"):
                await self._collector.settled()
        except (Exception, asyncio.CancelledError):
            if not self._mid_step:
                await self.checkpoints.last(self.step, train_seconds=self.train_seconds)
            raise
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _begin(self) -> None:
        # Episodes waiting at the server have taken seeds, which must not be reused.
        await self._collector.received_until(self.parts.history.open_until)
        await self._evaluate_again(self.parts.history.interrupted)
        with self.parts.progress.waiting("the first weights to be published"):
            await self._publish()

    async def _evaluate_again(self, steps: Sequence[int]) -> None:
        whole = self.parts.folder.whole_checkpoints()
        for step in steps:
            if self._restore is None or not self.policy.holds or step not in whole:
                self.parts.progress.note(
                    f"evaluation step-{step} was interrupted and is left out: its weights are gone"
                )
                continue
            with self.parts.progress.waiting(f"the weights of step {step}, for its evaluation"):
                await self._restore(step)
                version = await self.policy.publish(step, is_past=True)
            self._lags.published(version, step=step)
            await self.evaluator.again(step)
            await self._restore(self.step)

    async def _train(self) -> None:
        await self.evaluator.before(self.step)
        await self.evaluator.during(self.step, steps=self._steps)
        self._began = time.monotonic() - self.train_seconds
        while self.step < self._steps:
            await self._renew_reference()
            step = await self._take(self.step + 1)
            await finish_despite_cancel(self._train_step(step), within_s=STEP_GRACE_S)
            await self.checkpoints.after(
                self.step,
                train_seconds=self.train_seconds,
                is_needed=self.evaluator.runs_beside(self.step, steps=self._steps)
                or self._reference(self.step) == self.step,
            )
            await self.evaluator.during(self.step, steps=self._steps)
            await self.log.tell_health(self.step)
        await self.evaluator.after(self.step)
        self.checkpoints.delete_old()

    def _needed(self, steps: Collection[int]) -> set[int]:
        newest = sorted(steps)[-self.parts.config.training.keep_checkpoints :]
        return {*self.evaluator.needed(steps), *map(self._reference, newest)}

    def _reference(self, step: int) -> int:
        """The step whose weights are the reference after `step`; 0: the start policy's."""
        every = self.parts.config.training.kl_reference_every
        return step - step % every if every else 0

    async def _renew_reference(self) -> None:
        reference = self._reference(self.step)
        if reference and reference != self._referred and self._renew is not None:
            with self.parts.progress.waiting(f"the weights of step {reference}, the KL reference"):
                await self._renew(reference)
            self._referred = reference

    async def _take(self, number: int) -> TrainingStep:
        held, calls = self._collector.held.seconds, self.policy.calls.seconds
        step = await self._stream.take(number, version=self.policy.version)
        if held := self._collector.held.seconds - held:
            step.sampling_share = min(1.0, (self.policy.calls.seconds - calls) / held)
        return step

    async def _train_step(self, step: TrainingStep) -> None:
        # They may train in the next batch.
        self._source.set_status(usable_versions=self._lags.usable(step.number))
        with self.parts.progress.waiting(f"step {step.number} to train"):
            async with self.policy.resting():
                await self._update.check(step)
                self._mid_step = True
                learned = await self._update.train(step)
            self.step = step.number
            began = time.monotonic()
            step.policy_version = await self._publish()
            step.publish_s = time.monotonic() - began
            measured = self.log.measured(step, learned)
            await self._source.commit([*measured.rows, *self._update.rows(step)])
            self.train_seconds = time.monotonic() - self._began
            self._mid_step = False
            self._update.note_tokens(step)
        await self.log.finished(step, measured)

    async def _publish(self) -> int:
        # No new episodes while weights load.
        self._source.set_status(engine_status="ENGINE.WEIGHT_SYNCING")
        version = await self.policy.publish(self.step)
        self._lags.published(version, step=self.step)
        self._source.set_status(
            engine_status="ENGINE.ROLLING",
            policy_version=version,
            global_step=self.step,
            usable_versions=self._lags.usable(self.step),
        )
        await self._stream.published(self.step)  # More groups may start.
        return version
