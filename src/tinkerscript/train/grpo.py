"""GRPO, top to bottom: evaluate; for every step collect groups, learn and publish; evaluate again.

Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath"): an episode's advantage is its reward
compared with the rewards of its group (rollouts/advantages.py); a failed episode has none and is left out.
What one update does to the weights is `Learner.update`. Invariant: with its journal and checkpoints, a run
can be cancelled at any point and resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import AlignmentError, NoSuccessError
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.alignment import constrained_share
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.tracing import is_on, span
from tinkerscript.train.backends.backend import STEP_GRACE_S, finish_despite_cancel
from tinkerscript.train.collector import Batch, Collector, StepBatches
from tinkerscript.train.evaluation import Evaluator
from tinkerscript.train.history import History
from tinkerscript.train.inspect_logs import write_logs
from tinkerscript.train.journal import (
    Checkpointed,
    Discarded,
    EpisodeAccepted,
    Journal,
    Resumed,
    SetAside,
    StepConsumed,
)
from tinkerscript.train.policy import Policy
from tinkerscript.train.recorder import RunRecorder
from tinkerscript.train.run_folder import ALIGNMENT_FILE, RunFolder
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.sources.source import EpisodeSource
from tinkerscript.train.step_metrics import (
    StepFacts,
    StepMetric,
    role_metrics,
    step_metrics,
    why_groups_do_not_train,
    why_nothing_trained,
)
from tinkerscript.train.trained_policy import AcceptedGroup, TrainedPolicy

CONSTRAINED_OUTCOMES = {
    "mask": "they carry no loss",
    "train": "they train as if the policy had chosen them freely",
    "refuse": "their sequences do not train",
}
"""What `training.constrained_tokens` does, for people."""


@dataclass
class GRPO:
    """One training run. `source` runs the episodes, `trained` updates the weights, `policy` samples."""

    config: RunConfig
    folder: RunFolder
    samples: TaskSamples | None
    """None: the episodes are samples that clients register themselves."""

    source: EpisodeSource
    policy: Policy
    trained: Sequence[TrainedPolicy]
    """The run's own policy, and then the roles that train beside it."""

    journal: Journal
    progress: ProgressReporter
    recorder: RunRecorder
    history: History = field(default_factory=History)
    """Where a resumed run continues; empty for a new one."""

    extra_metrics: Sequence[StepMetric] = ()
    train_seconds: float = 0.0
    step: int = 0
    """Training steps behind the current weights."""

    def __post_init__(self) -> None:
        self.collector = Collector(
            self.source,
            self.journal,
            self.progress,
            group_size=self.config.training.group_size,
            client_samples=self.samples is None,
            recorder=self.recorder,
            seen=self.policy.note,
        )
        self.evaluator = Evaluator(
            self.config.evaluation,
            self.samples,
            self.collector,
            self.policy,
            self.journal,
            self.folder,
            self.progress,
            self.recorder,
            inspect_logs=bool(self.config.training.inspect_log_every),
            finished=dict(self.history.evaluations),
            roles=[each.role for each in self.trained[1:]],
        )
        self._steps_of = dict(self.history.versions)
        """Policy version -> training steps behind it, for the versions that this run builds on."""

        self._between_steps = False
        """Whether the weights, the journal or the published version may be between two steps."""

        self._publish_s = 0.0
        """Seconds that the last publication took."""

        self._stale: set[str] = set()
        """Uuids of episodes of the step's batch that are too old to train."""

        self._untrained = Counter[str]()
        """By role (empty: the run's own policy): steps in a row, up to the last one, that trained nothing."""

        self.batches = StepBatches(self.collector, self.config.training, self.samples)
        self._min_group = self.config.training.min_group

    @property
    def own(self) -> TrainedPolicy:
        """The run's own policy."""
        return self.trained[0]

    async def run(self) -> None:
        """The whole run, or the rest of it. Cancelling it leaves a folder that can be resumed."""
        self._restore_replay()
        for outcome in self.history.from_clients:
            self.collector.gather(outcome)
        # Before anything is received: outcomes that the server redelivers must find their batch.
        for outcome in self.batches.restore(self.history):
            self.policy.note(outcome)
        receiving = asyncio.create_task(self.collector.run(), name="receive outcomes")
        try:
            await self._resume()
            await self._train()
            with self.progress.waiting("the last episodes to end"):
                await self.collector.settled()
        except asyncio.CancelledError:
            await self._checkpoint_before_leaving()
            raise
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _train(self) -> None:
        steps = self.config.training.steps
        await self.evaluator.before(self.step)
        await self.evaluator.during(self.step, steps=steps)  # If a restart interrupted it.
        started = time.monotonic() - self.train_seconds
        batch = await self.batches.open(self.step + 1)
        for step in range(self.step + 1, steps + 1):
            self._collecting_since = time.monotonic()
            await self._close(batch, step)
            upcoming = None
            if self.config.training.asynchronous and step < steps:
                upcoming = await self.batches.open(step + 1)
            while not await finish_despite_cancel(self.train_step(step, batch), within_s=STEP_GRACE_S):
                batch = await self.batches.open(step)
                await self._close(batch, step)
            self.train_seconds = time.monotonic() - started
            await self._checkpoint_if_due()
            await self.evaluator.during(step, steps=steps)
            if step < steps:
                batch = upcoming or await self.batches.open(step + 1)
        await self.evaluator.after(self.step)

    async def _close(self, batch: Batch, step: int) -> None:
        """Wait for the step's batch. One without a success leaves a journal and a checkpoint to resume
        from."""
        try:
            await self.batches.close(batch, step)
        except NoSuccessError as error:
            await self._set_aside(batch, step, error)
            raise

    async def _set_aside(self, batch: Batch, step: int, error: Exception) -> None:
        """The run ends here, and the resumed one gets fresh episodes for this step."""
        self.journal.write([SetAside(step=step, episode_uuids=list(batch.outcomes), reason=str(error))])
        if self.step and not self.folder.has_checkpoint(self.step):
            await self._checkpoint()

    # A step

    async def train_step(self, step: int, batch: Batch) -> bool:
        """Learn from a full batch, and from groups of earlier steps, and publish the result.

        False, with nothing changed, if every result of the batch is stale: the step needs another batch.
        """
        collected, now = time.monotonic(), time.time()
        self._stale.clear()
        groups, lags = self.fresh_groups(batch)
        if lags and all(lag is None or lag > self.config.training.max_policy_lag for lag in lags):
            self.progress.note(
                f"step {step}: all {sum(lags.values())} results of the batch are stale and were discarded; "
                "collecting another one"
            )
            return False
        self._accept(step + 1)
        for each in self.trained:
            each.take(groups, replayed=self._replayed(each, step, lags, now=now))
        with self.progress.waiting(f"step {step} to train"):
            self._between_steps = True
            learned = await self._learn(step, batch, lags, now=now)
            self.step = step
            publishing = time.monotonic()
            await self.publish()
            self._publish_s = time.monotonic() - publishing
            consumed = StepConsumed(
                step=step,
                episode_uuids=list(batch.outcomes),
                trained=self.own.used_uuids,
                trained_by_role={each.role: each.used_uuids for each in self.trained[1:]},
                time=now,
            )
            self.journal.write([consumed])
            self._between_steps = False
        await self._record(batch, lags, learned, collected=collected)
        return True

    def _accept(self, step: int) -> None:
        """Results are for the batch of `step` now: tell who runs episodes which versions may train in it."""
        oldest = step - 1 - self.config.training.max_policy_lag
        self.source.accepts([version for version, steps in self._steps_of.items() if steps >= oldest])

    async def _record(
        self, batch: Batch, lags: Counter[int | None], learned: dict[str, float], *, collected: float
    ) -> None:
        """Write the step's metrics and rollouts to the run folder. `collected`: when its batch was full."""
        step, payloads = self.step, self._payloads(batch)
        facts = self._facts(step, batch, lags, payloads, collected=collected)
        metrics = learned | step_metrics(facts, self.extra_metrics) | self.own.report.step.metrics()
        for each in self.trained:
            name = f"step_{step:04d}" + (f".{each.role}" if each.role else "")
            self.folder.write_rollouts(name, each.groups, batch.outcomes, each.learner.rule)
        await self._log_for_inspect(step, facts, payloads)
        self.folder.log_metrics(metrics, step=step)
        self._tell_recorder(step, batch, lags, metrics)
        self.folder.write_json(ALIGNMENT_FILE, self.alignment())
        await asyncio.to_thread(self.folder.draw_curve)
        self.progress.step(step, metrics)
        self._warn_if_nothing_trained(why_nothing_trained(facts, metrics))
        for each in self.trained[1:]:
            is_idle = not metrics[f"role/{each.role}/train/sequences"]
            self._warn_if_nothing_trained(why_groups_do_not_train(each.groups) if is_idle else "", each.role)

    def _tell_recorder(
        self,
        step: int,
        batch: Batch,
        lags: Counter[int | None],
        metrics: dict[str, float],
        *,
        stopped: str = "",
    ) -> None:
        self.recorder.step(
            step,
            outcomes=batch.outcomes,
            trained=self.trained,
            metrics=metrics,
            max_lag=_largest(lags),
            stale=self._stale,
            stopped=stopped,
        )

    def alignment(self) -> dict[str, Any]:
        """The contents of alignment.json."""
        roles = {each.role: each.report.as_json() for each in self.trained[1:]}
        return {**self.own.report.as_json(), **({"roles": roles} if roles else {})}

    def _facts(
        self,
        step: int,
        batch: Batch,
        lags: Counter[int | None],
        payloads: dict[str, dict[str, Any]],
        *,
        collected: float,
    ) -> StepFacts:
        return StepFacts(
            batch=batch,
            groups=self.own.groups,
            lags=lags,
            max_policy_lag=self.config.training.max_policy_lag,
            distills=bool(self.config.training.distillation.teacher),
            policy_version=self.policy.version,
            cancelled=self.batches.cancelled[step],
            tasks=self.samples.tasks if self.samples else [],
            task_of={uuid: payload["task"] for uuid, payload in payloads.items()},
            rollout_s=collected - self._collecting_since,
            train_s=time.monotonic() - collected,
            publish_s=self._publish_s,
        )

    def _record_stopped(
        self, step: int, batch: Batch, lags: Counter[int | None], error: AlignmentError, *, began: float
    ) -> None:
        """The step that ends the run is in its record: whoever looks for the cause looks there."""
        facts = self._facts(step, batch, lags, self._payloads(batch), collected=began)
        metrics = step_metrics(facts, ()) | self.own.report.step.metrics()
        self._tell_recorder(step, batch, lags, metrics, stopped=error.name)

    def _warn_if_nothing_trained(self, reason: str, role: str = "") -> None:
        """Warn at the first of several such steps in a row, and at every tenth."""
        self._untrained[role] = self._untrained[role] + 1 if reason else 0
        if self._untrained[role] % 10 == 1:
            of_role = f"role {role}: " if role else ""
            self.progress.note(f"step {self.step} trained nothing: {of_role}{reason}")

    def fresh_groups(self, batch: Batch) -> tuple[list[AcceptedGroup], Counter[int | None]]:
        """The batch's groups with enough fresh episodes (`TrainingConfig.min_group`), and how many episodes
        have each lag."""
        lags: Counter[int | None] = Counter()
        groups: list[AcceptedGroup] = []
        for group in batch.trainable(self._min_group):
            fresh = [outcome for outcome in group.accepted if self._is_fresh(outcome, lags)]
            if len(fresh) >= self._min_group:
                groups.append((group.group_id, fresh))
        return groups, lags

    def _is_fresh(self, outcome: EpisodeAccepted, lags: Counter[int | None]) -> bool:
        """Whether an episode may still train; counts its lag (None: weights that this run does
        not stand on)."""
        lag = self._lag(outcome, at_step=self.step)
        lags[lag] += 1
        if lag is not None and lag <= self.config.training.max_policy_lag:
            return True
        self._stale.add(outcome.episode_uuid)
        reason = (
            "stale: sampled by weights that this run does not stand on"
            if lag is None
            else f"stale: {lag} steps old"
        )
        self.journal.write([Discarded(episode_uuids=[outcome.episode_uuid], reason=reason)])
        return False

    def _lag(self, episode: EpisodeAccepted | EpisodeRollouts, *, at_step: int) -> int | None:
        """How many steps the oldest weights that sampled the episode were behind those of `at_step`; None for
        weights that this run does not stand on."""
        if isinstance(episode, EpisodeAccepted):
            versions = episode.policy_versions or {episode.policy_version_at_claim}
        else:
            versions = {version for call in episode.calls for version in call.policy_versions}
        behind = [self._steps_of.get(version) for version in versions]
        return (
            None if None in behind else at_step - min((s for s in behind if s is not None), default=at_step)
        )

    # Replay

    def _replayed(
        self, policy: TrainedPolicy, step: int, lags: Counter[int | None], *, now: float
    ) -> list[RolloutGroup]:
        """Groups of earlier steps that train again; counts the lags of the run's own policy's."""
        if policy.replay is None:
            return []
        policy.replay.drop(now=now, is_fresh=partial(self._may_be_replayed, step))
        groups = policy.replay.draw(step)
        if policy is self.own:
            lags.update(
                self._lag(episode, at_step=step - 1) for group in groups for episode in group.episodes
            )
        return groups

    def _may_be_replayed(self, step: int, group: RolloutGroup) -> bool:
        """Whether the group is fresh enough for `step`, which begins with the weights of the one before."""
        lags = [self._lag(episode, at_step=step - 1) for episode in group.episodes]
        return all(lag is not None and lag <= self.config.training.max_policy_lag for lag in lags)

    def _restore_replay(self) -> None:
        """Keep what an uninterrupted run would have kept."""
        for policy in self.trained:
            if policy.replay is None:
                continue
            for event in self.history.consumed:
                groups = event.trained_by_role.get(policy.role, []) if policy.role else event.trained
                again = [policy.group_again([self.history.trained[uuid] for uuid in each]) for each in groups]
                policy.replay.drop(now=event.time, is_fresh=partial(self._may_be_replayed, event.step))
                policy.replay.record(again, at=event.time)
        self.history.consumed, self.history.trained = [], {}

    async def _learn(
        self, step: int, batch: Batch, step_lags: Counter[int | None], *, now: float
    ) -> dict[str, float]:
        """Update the weights. A misaligned step leaves a journal and a checkpoint to resume from."""
        found_before, began = [len(each.report.findings) for each in self.trained], time.monotonic()
        lags = {version: self.step - steps for version, steps in self._steps_of.items()}
        metrics: dict[str, float] = {}
        try:
            links = claims_of(self.own.groups, batch) if is_on() else ()
            async with self.policy.resting():
                with span("train step", step=step, links=links):
                    for each in self.trained:  # Before any weights change.
                        await each.check(step, lags)
                    for each in self.trained:
                        metrics |= _named(each, await each.train(step, now=now))
        except AlignmentError as error:
            self._tell_findings(step, found_before)
            self._record_stopped(step, batch, step_lags, error, began=began)
            await self._set_aside(batch, step, error)
            raise
        self._tell_findings(step, found_before)
        self._warn_of_constrained(step)
        return metrics

    def _tell_findings(self, step: int, before: Sequence[int]) -> None:
        """Findings beyond the first `before` of each policy's report."""
        for each, known in zip(self.trained, before, strict=True):
            for finding in each.report.findings[known:]:
                detail = f"role {each.role}: {finding['detail']}" if each.role else str(finding["detail"])
                self.progress.note(f"step {step}: {finding['name']}: {detail}")
                self.recorder.finding(step, str(finding["name"]), detail)

    def _warn_of_constrained(self, step: int) -> None:
        """Once in a run: at the first step that has constrained tokens."""
        report = self.own.report
        found = report.step.constrained.total()
        if found and found == report.whole.constrained.total():
            policy = self.config.training.constrained_tokens
            self.progress.note(
                f"step {step}: {constrained_share(report.step)}; {CONSTRAINED_OUTCOMES[policy]} "
                f"(training.constrained_tokens: {policy})"
            )

    async def publish(self) -> None:
        """Make the current weights the next policy version, for every episode from now on."""
        self.source.publishing()
        version = await self.policy.publish(self.step)
        self._steps_of[version] = self.step
        self._accept(self.step + 1)
        await self.source.publish(version, self.step)

    def _payloads(self, batch: Batch) -> dict[str, dict[str, Any]]:
        """Episode uuid -> payload; without clients' own samples."""
        samples, registered = self.samples, self.journal.registered
        if samples is None:
            return {}
        return {uuid: samples.payload_at(registered[uuid].position) for uuid in batch.outcomes}

    async def _log_for_inspect(
        self, step: int, facts: StepFacts, payloads: dict[str, dict[str, Any]]
    ) -> None:
        every = self.config.training.inspect_log_every
        if not every or step % every:
            return
        # In a thread: inside a running event loop, Inspect replaces asyncio.run for good.
        path, rule = self.folder.path, self.own.learner.rule
        label, groups, accepted = f"step-{step:04d}", facts.groups, facts.accepted
        paths = await asyncio.to_thread(write_logs, path, label, step, groups, accepted, payloads, rule=rule)
        self.folder.copy_out(*paths)

    # Checkpoints

    async def _checkpoint_if_due(self) -> None:
        training = self.config.training
        every = training.checkpoint_every
        if self.step == training.steps or (every and self.step % every == 0):
            await self._checkpoint()

    async def _checkpoint_before_leaving(self) -> None:
        """Save the last finished step of a run that is stopped."""
        if self.step and not self._between_steps and not self.folder.has_checkpoint(self.step):
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        with self.progress.waiting(f"the checkpoint of step {self.step}"):
            await self.save_checkpoint(self.folder.checkpoint_name(self.step))
        checkpointed = Checkpointed(
            step=self.step,
            policy_version=self.policy.version,
            report=self.own.report.as_json(),
            role_reports={each.role: each.report.as_json() for each in self.trained[1:]},
            train_seconds=self.train_seconds,
        )
        self.journal.write([checkpointed])
        self.folder.checkpointed(self.step)

    async def save_checkpoint(self, name: str) -> None:
        """Write the weights of every policy under `name`; those of the run's own are the last, and so a
        checkpoint that is there is complete."""
        for each in (*self.trained[1:], self.own):
            await each.learner.save_checkpoint(name)

    async def _resume(self) -> None:
        """Publish the weights that the run starts from; cancel episodes that it can no longer use."""
        self.step = self.history.step
        if self.journal.registered:
            self.journal.write([Resumed(step=self.step)])
            self.collector.receive(await self.source.lost(self.journal.unfinished()))
            wanted = {plan.episode_uuid for plan in self.history.planned}
            given_up = [event for event in self.journal.unfinished() if event.episode_uuid not in wanted]
            await self.source.abandon(given_up, "the run was resumed before the step of this episode")
            # Receive the results that the server kept before any seed is given out: theirs are taken.
            await self.source.flush()
        with self.progress.waiting("the first weights to be published"):
            await self.publish()


def _largest(lags: Counter[int | None]) -> int | None:
    return max((lag for lag in lags if lag is not None), default=None)


def _named(policy: TrainedPolicy, learned: dict[str, float]) -> dict[str, float]:
    """The metrics of a policy's update; those of a role's under its name, with what `step_metrics` has of the
    run's own."""
    if not policy.role:
        return learned
    return role_metrics(policy.role, policy.groups, learned, policy.report.step.metrics())


def claims_of(groups: Sequence[RolloutGroup], batch: Batch) -> list[tuple[str, int]]:
    """Episode and attempt of what a step trains on, but for what is replayed."""
    outcomes = (batch.outcomes.get(each.episode_uuid) for group in groups for each in group.episodes)
    return [(each.episode_uuid, each.attempt) for each in outcomes if isinstance(each, EpisodeAccepted)]
