"""GRPO, top to bottom: evaluate; for every step collect groups, learn and publish; evaluate again.

Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath"): an episode's advantage is its reward
compared with the rewards of its group (rollouts/advantages.py); a failed episode has none and is left out.
What one step does to the weights is `Learner`. Invariant: with its ledger and checkpoints, a run can be
cancelled at any point and resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from tinkerscript.errors import AlignmentError, NoSuccessError
from tinkerscript.ledger.rows import CheckpointRow, StepRow, TrainedRow, Use
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.tracing import is_on, span
from tinkerscript.train.backends.backend import STEP_GRACE_S, finish_despite_cancel
from tinkerscript.train.collector import Batch, Collector, StepBatches, why_failed
from tinkerscript.train.episode_source import EpisodeSource
from tinkerscript.train.evaluation import Evaluator
from tinkerscript.train.learner import Learner
from tinkerscript.train.off_policy import Lags, PolicyLags
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.policy import Policy
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_log import StepLog, TrainingStep
from tinkerscript.train.step_metrics import StepMetric
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome

LAST_COMMIT_S = 10.0
"""How long a run that is ended waits for the ledger to know its last checkpoint."""


@dataclass
class GRPO:
    """One training run. `source` runs the episodes, `learners` update the weights, `policy` samples."""

    parts: OpenRun
    samples: TaskSamples | None
    """None: the episodes are samples that clients register themselves."""

    source: EpisodeSource
    policy: Policy
    learners: Sequence[Learner]
    """The run's own policy, and then the roles that train beside it."""

    extra_metrics: Sequence[StepMetric] = ()
    step: int = 0
    """Training steps behind the current weights."""

    def __post_init__(self) -> None:
        parts = self.parts
        self.train_seconds = parts.train_seconds
        self.collector = Collector(
            self.source,
            parts.progress,
            group_size=parts.config.training.group_size,
            client_samples=self.samples is None,
            recorder=parts.recorder,
            seen=self.policy.note,
        )
        roles = [each.role for each in self.learners[1:]]
        self.evaluator = Evaluator(parts, self.samples, self.collector, self.policy, roles)
        self.log = StepLog(parts, self.samples, self.learners, self.extra_metrics)
        self.lags = PolicyLags(self.parts.config.training, self.parts.history.versions)
        self._sequences: dict[str, int] = {}
        """Uuid of each episode that may train again -> its sequence."""

        self.batches = StepBatches(self.collector, self.parts.config.training, self.samples)
        self._between_steps = False
        """Whether the weights, the ledger or the published version may be between two steps."""

    @property
    def own(self) -> Learner:
        """The run's own policy."""
        return self.learners[0]

    async def run(self) -> None:
        """The whole run, or the rest of it. Cancelling it leaves a folder that can be resumed."""
        self._restore()
        receiving = asyncio.create_task(self.collector.run(), name="receive outcomes")
        try:
            await self._resume()
            await self._train()
            with self.parts.progress.waiting("the last episodes to end"):
                await self.collector.settled()
        except asyncio.CancelledError:
            if self.step and not self._between_steps and not self.parts.folder.has_checkpoint(self.step):
                # Of the last finished step. The server may be what ended the run.
                with suppress(TimeoutError):
                    await self._checkpoint(within_s=LAST_COMMIT_S)
            raise
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    # The loop

    async def _train(self) -> None:
        training, evaluator = self.parts.config.training, self.evaluator
        await evaluator.before(self.step)
        await evaluator.during(self.step, steps=training.steps)  # If a restart interrupted it.
        started = time.monotonic() - self.train_seconds
        batch = await self.batches.open(self.step + 1)
        while self.step < training.steps:
            step = await self._collect(batch)
            is_last = step.number == training.steps
            ahead = training.asynchronous and not is_last
            upcoming = await self.batches.open(step.number + 1) if ahead else None
            await finish_despite_cancel(self._train_step(step), within_s=STEP_GRACE_S)
            self.train_seconds = time.monotonic() - started
            if is_last or (training.checkpoint_every and self.step % training.checkpoint_every == 0):
                await self._checkpoint()
            await evaluator.during(self.step, steps=training.steps)
            await self.log.tell_health(self.step)
            if not is_last:
                batch = upcoming or await self.batches.open(step.number + 1)
        await evaluator.after(self.step)

    async def _collect(self, batch: Batch) -> TrainingStep:
        """Wait for the step's batch, and for another one while all its results are too old to train."""
        number, began, lags = self.step + 1, time.monotonic(), Lags()
        while True:
            try:
                cancelled = await self.batches.close(batch, number)
            except NoSuccessError as error:
                await self._set_aside(batch, number, error)
                raise
            complete = batch.trainable(self.parts.config.training.min_group)
            found = self.lags.fresh(((each.group_id, each.accepted) for each in complete), step=self.step)
            lags.update(found.lags)
            if not found.all_stale:
                return TrainingStep(
                    number,
                    batch,
                    found.groups,
                    lags,
                    stale=found.stale,
                    began=began,
                    policy_version=self.policy.version,
                    cancelled=cancelled,
                )
            self.source.note(_left_out(batch, number, stale=found.stale))
            self.parts.progress.note(
                f"step {number}: all {len(found.stale)} results of the batch are stale and were discarded; "
                "collecting another one"
            )
            batch = await self.batches.open(number)

    async def _train_step(self, step: TrainingStep) -> None:
        """Learn from a full batch, and from groups of earlier steps, and publish the result."""
        self.source.set_status(usable_versions=self.lags.usable(step.number))  # Of the next batch.
        with self.parts.progress.waiting(f"step {step.number} to train"):
            self._between_steps = True
            learned = await self._learn(step)
            self.step = step.number
            began = time.monotonic()
            step.policy_version = await self._publish()
            step.publish_s = time.monotonic() - began
            row = StepRow(step=step.number, time=time.time(), policy_version=step.policy_version)
            await self.source.commit([row, *self._trained(step)])
            self._between_steps = False
        await self.log.finished(step, learned)

    def _trained(self, step: TrainingStep) -> list[TrainedRow]:
        """What the step did with each episode: those of its batch, and those that it replayed."""
        sequences = self._sequences | {
            uuid: outcome.sequence for uuid, outcome in step.batch.outcomes.items()
        }
        rows = {(row.episode, row.role): row for row in _left_out(step.batch, step.number, stale=step.stale)}
        for learner in self.learners:
            places = {id(group): place for place, group in enumerate(learner.used)}
            for group in (*learner.groups, *learner.replayed):
                for episode in group.episodes:
                    row = TrainedRow(
                        episode=sequences[episode.episode_uuid],
                        step=step.number,
                        role=learner.role,
                        outcome=learner.outcome_of(group, episode),
                        place=places.get(id(group), -1),
                    )
                    rows[row.episode, row.role] = row
            if learner.replay is not None:
                self._sequences = sequences
        return list(rows.values())

    async def _learn(self, step: TrainingStep) -> list[dict[str, float]]:
        """Update the weights. A misaligned step leaves a ledger and a checkpoint to resume from."""
        by_version = self.lags.by_version(self.step)
        links = _claims_of(step) if is_on() else ()
        try:
            async with self.policy.resting():
                with span("train step", step=step.number, links=links):
                    taken = [(each, each.take(step.groups)) for each in self.learners]
                    for each, groups in taken:  # All are checked before any weights change.
                        replayed = self._replayed(each, step)
                        await each.check(groups, step=step.number, lags=by_version, replayed=replayed)
                    return [await each.train(step.number) for each in self.learners]
        except AlignmentError as error:
            self.log.stopped(step, error)
            await self._set_aside(step.batch, step.number, error)
            raise

    def _replayed(self, learner: Learner, step: TrainingStep) -> list[RolloutGroup]:
        """Groups of earlier steps that train again; counts the lags of the run's own policy's."""
        if learner.replay is None:
            return []
        learner.replay.drop(partial(self.lags.may_train, step=self.step))
        groups = learner.replay.draw(step.number)
        for group in groups if learner is self.own else ():
            step.lags.update(self.lags.of_group(group, step=self.step))
        return groups

    async def _publish(self) -> int:
        """Make the current weights the next policy version, for every episode from now on."""
        self.source.set_status(engine_status="ENGINE.WEIGHT_SYNCING")  # Holds back new episodes.
        version = await self.policy.publish(self.step)
        self.lags.published(version, step=self.step)
        self.source.set_status(
            engine_status="ENGINE.ROLLING",
            policy_version=version,
            global_step=self.step,
            usable_versions=self.lags.usable(self.step),
        )
        return version

    # Checkpoints and resuming

    async def _set_aside(self, batch: Batch, step: int, error: Exception) -> None:
        """The run ends here, and the resumed one gets fresh episodes for this step."""
        await self.source.commit(
            [
                TrainedRow(episode=each.sequence, step=step, outcome=Use.SET_ASIDE, reason=str(error))
                for each in batch.outcomes.values()
            ]
        )
        if self.step and not self.parts.folder.has_checkpoint(self.step):
            await self._checkpoint()

    async def _checkpoint(self, *, within_s: float | None = None) -> None:
        """Save the weights, and tell the ledger. Raises TimeoutError if it does not answer in `within_s`."""
        with self.parts.progress.waiting(f"the checkpoint of step {self.step}"):
            await self.save_checkpoint(self.parts.folder.checkpoint_name(self.step))
        roles = {each.role: each.report.as_json() for each in self.learners[1:]}
        checkpointed = CheckpointRow(
            step=self.step,
            time=time.time(),
            policy_version=self.policy.version,
            train_seconds=self.train_seconds,
            report=msgspec.json.encode(self.own.report.as_json()),
            role_reports=msgspec.json.encode(roles),
        )
        async with asyncio.timeout(within_s):
            await self.source.commit([checkpointed])
        self.parts.folder.checkpointed(best=self.evaluator.best_step)

    async def save_checkpoint(self, name: str) -> None:
        """Write the weights of every policy under `name`."""
        for each in (*self.learners[1:], self.own):
            await each.save_checkpoint(name)
        self.parts.folder.seal(name)

    def _restore(self) -> None:
        """Rebuild what an uninterrupted run would have: the replay buffers, and the batch that was open.

        Comes before anything is received: outcomes that wait at the server must find their batch.
        """
        outcomes = {each.sequence: each for each in self.parts.replayed}
        groups: dict[tuple[int, str, int], list[EpisodeAccepted]] = {}
        for row in self.parts.history.replayed:
            groups.setdefault((row.step, row.role, row.place), []).append(outcomes[row.episode])
        for learner in self.learners:
            of_role = {key: group for key, group in groups.items() if key[1] == learner.role}
            for step in sorted({step for step, _, _ in of_role}) if learner.replay is not None else ():
                assert learner.replay is not None
                learner.replay.drop(partial(self.lags.may_train, step=step - 1))
                used = [group for key, group in of_role.items() if key[0] == step]
                learner.replay.record(map(learner.group_again, used))
        self._sequences = {each.episode_uuid: each.sequence for each in self.parts.replayed}
        self.batches.restore(self.parts.history)

    async def _resume(self) -> None:
        """Publish the weights that the run starts from."""
        self.step = self.parts.history.step
        # What waited at the server comes before any seed is given out: theirs are taken.
        await self.collector.received_until(self.parts.history.open_until)
        with self.parts.progress.waiting("the first weights to be published"):
            await self._publish()


def _left_out(batch: Batch, step: int, *, stale: Mapping[str, str]) -> list[TrainedRow]:
    """The rows of a batch's episodes as if none had trained. `stale`: uuid -> why it is too old."""
    return [
        TrainedRow(
            episode=outcome.sequence,
            step=step,
            outcome=_why_left_out(outcome, stale),
            reason=why_failed(outcome) if isinstance(outcome, EpisodeFailed) else stale.get(uuid, ""),
        )
        for uuid, outcome in batch.outcomes.items()
    ]


def _why_left_out(outcome: Outcome, stale: Mapping[str, str]) -> str:
    if isinstance(outcome, EpisodeFailed):
        return Use.LEFT_OUT
    return Use.STALE if outcome.episode_uuid in stale else Use.GROUP_TOO_SMALL


def _claims_of(step: TrainingStep) -> list[tuple[str, int]]:
    """Episode and attempt of what a step trains on, but for what is replayed."""
    fresh: list[EpisodeAccepted] = [each for _, accepted in step.groups for each in accepted]
    return [(each.episode_uuid, each.attempt) for each in fresh]
