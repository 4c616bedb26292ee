"""GRPO, top to bottom: evaluate, then for every step collect groups, learn, publish; evaluate again.

Group Relative Policy Optimization: Shao et al. 2024, "DeepSeekMath". An episode's advantage is its
reward against its group's (rollouts/advantages.py); a failed episode has none and is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.watcher import ProgressReporter
from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts, RolloutGroup
from tinkerscript.train.alignment_check import advantage_rule
from tinkerscript.train.batch import MIN_GROUP, Batch, Group
from tinkerscript.train.collector import Collector
from tinkerscript.train.history import History
from tinkerscript.train.inspect_logs import write_step
from tinkerscript.train.journal import (
    Checkpointed,
    Discarded,
    EpisodeAccepted,
    Evaluated,
    Journal,
    Misaligned,
    PolicyPublished,
    Resumed,
    StepConsumed,
)
from tinkerscript.train.learner import Learner
from tinkerscript.train.metrics import by_task, reported
from tinkerscript.train.policy import Policy
from tinkerscript.train.run_folder import ALIGNMENT_FILE, RunFolder
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.source import EpisodeSource, PlannedEpisode


@dataclass
class GRPO:
    """One training run. `source` runs the episodes, `learner` updates the weights."""

    config: RunConfig
    folder: RunFolder
    samples: TaskSamples | None
    """None where the episodes are samples that clients register themselves."""

    source: EpisodeSource
    policy: Policy
    learner: Learner
    journal: Journal
    report: AlignmentReport
    watcher: ProgressReporter
    history: History = field(default_factory=History)
    """Where a resumed run goes on; empty for a new one."""

    evaluations: dict[str, Evaluated] = field(default_factory=dict[str, Evaluated])
    train_seconds: float = 0.0
    step: int = 0
    """Training steps behind the current weights."""

    def __post_init__(self) -> None:
        size = self.config.training.group_size
        self.collector = Collector(
            self.source, self.journal, self.watcher, group_size=size, seen=self.policy.note
        )
        for outcome in self.history.from_clients:
            self.collector.gather(outcome)
        self._steps_of = dict(self.history.versions)
        """Policy version -> training steps behind it, of the versions that this run stands on."""

        self._cancelled = Counter[int]()
        self._resumed: tuple[Batch, list[PlannedEpisode]] | None = None
        """The batch of the next step, where a run goes on."""

    async def run(self) -> None:
        """The whole run, or the rest of it. Cancelling it leaves a run folder that can be resumed."""
        # First of all: what the server delivers at once must find the batch that it belongs to.
        self._resumed = self._planned_before()
        receiving = asyncio.create_task(self.collector.run(), name="receive outcomes")
        try:
            await self._train()
            await self.collector.settled()
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _train(self) -> None:
        steps, evaluation = self.config.training.steps, self.config.evaluation
        await self._go_on()
        await self.evaluate("before", evaluation.episodes)
        await self._evaluate_if_due()  # The one that a kill cut: its step's checkpoint was there already.
        started = time.monotonic() - self.train_seconds
        batch = await self._open(self.step + 1)
        for step in range(self.step + 1, steps + 1):
            await self._close(batch, step)
            upcoming = None
            if self.config.training.asynchronous and step < steps:
                upcoming = await self._open(step + 1)
            await self.train_step(step, batch)
            self.train_seconds = time.monotonic() - started
            await self._checkpoint_if_due(step)
            await self._evaluate_if_due()
            if step < steps:
                batch = upcoming or await self._open(step + 1)
        await self.evaluate("after", evaluation.episodes)

    async def _evaluate_if_due(self) -> None:
        every, steps = self.config.evaluation.every_steps, self.config.training.steps
        if every and self.step % every == 0 and 0 < self.step < steps:
            await self.evaluate(f"step-{self.step}", self.config.evaluation.interim_episodes)

    async def _go_on(self) -> None:
        """Publish the weights that the run stands on, and give up what it cannot use any more."""
        self.step = self.history.step
        self.evaluations = dict(self.history.evaluations)
        if self.journal.registered:
            self.journal.write([Resumed(step=self.step)])
            self.collector.receive(await self.source.lost(self.journal.unfinished()))
            wanted = {plan.episode_uuid for plan in self.history.planned}
            given_up = [event for event in self.journal.unfinished() if event.episode_uuid not in wanted]
            await self.source.abandon(given_up, "the run was resumed before the step of this episode")
            # Results that the server kept come first: their seeds must be known before any is given.
            await self.source.flush()
        await self.publish()

    # Batches

    async def _open(self, step: int) -> Batch:
        """The batch of a step, with its episodes on their way (again, for a resumed run)."""
        if self._resumed is not None:
            (batch, episodes), self._resumed = self._resumed, None
            await self.collector.go_on(episodes)
            return batch
        training, batch = self.config.training, self._batch(step)
        if self.samples is not None and step <= training.steps:
            groups = training.groups_per_step + training.extra_groups
            await self.collector.open(batch, self._plan(step, groups), step=step)
        return batch

    def _batch(self, step: int) -> Batch:
        training = self.config.training
        return Batch(
            f"step {step}",
            rule=training.batch_rule,
            groups=training.groups_per_step,
            group_size=training.group_size,
            max_groups=training.max_groups_per_step or 4 * training.groups_per_step,
            from_clients=self.samples is None,
        )

    def _plan(self, step: int, groups: int) -> list[list[PlannedEpisode]]:
        assert self.samples is not None
        size = self.config.training.group_size
        return self.samples.train_groups(step=step, groups=groups, group_size=size)

    def _planned_before(self) -> tuple[Batch, list[PlannedEpisode]] | None:
        """The next step's batch as it was when the run was cut, with what had ended; None if none."""
        if self.samples is None or not self.history.planned:
            return None
        batch = self._batch(self.history.step + 1)
        again = self.samples.planned_again
        episodes = [
            again(plan.group_id, plan.position, episode_uuid=plan.episode_uuid)
            for plan in self.history.planned
        ]
        self.collector.expect(batch, episodes)
        for outcome in self.history.outcomes.values():
            self.policy.note(outcome)
            batch.add(outcome)
        return batch, episodes

    async def _close(self, batch: Batch, step: int) -> None:
        """Wait until the batch has what its rule asks for."""
        self._began = time.monotonic()
        if self.samples is None:
            await self.collector.filled(batch)
        else:
            self._cancelled[step] = await self.collector.closed(batch, lambda n: self._plan(step, n), step)

    # A step

    async def train_step(self, step: int, batch: Batch) -> None:
        """Learn and publish; the step's metrics and rollouts go to the run folder."""
        collected = time.monotonic()
        lags: Counter[int | None] = Counter()
        self.report.begin_step()
        groups = self.group(batch.trainable(), lags)
        behind = {version: self.step - steps for version, steps in self._steps_of.items()}
        metrics = await self._learn(groups, step, behind, batch)
        self.step = step
        await self.publish()
        learned = time.monotonic()
        outcomes = batch.outcomes
        self.journal.write([StepConsumed(step=step, episode_uuids=list(outcomes))])
        metrics |= self.step_metrics(batch, groups, lags) | self.report.step.metrics()
        if self.samples is not None:
            tasks = self._tasks_of(self._payloads(batch))
            metrics |= by_task(outcomes.values(), tasks, "reward", tasks=self.samples.tasks)
        metrics["time/rollout_s"], metrics["time/train_s"] = collected - self._began, learned - collected
        metrics["episodes_per_s"] = len(outcomes) / (learned - self._began)
        metrics["episodes/cancelled"] = float(self._cancelled[step])
        self.folder.write_rollouts(f"step_{step:04d}", groups, outcomes)
        await self._log_for_inspect(step, groups, batch)
        self.folder.log_metrics(metrics, step=step)
        self.folder.write_json(ALIGNMENT_FILE, self.report.as_json())
        self.watcher.step(step, metrics)

    async def _log_for_inspect(self, step: int, groups: list[RolloutGroup], batch: Batch) -> None:
        every = self.config.training.inspect_log_every
        if not every or step % every:
            return
        accepted = [o for o in batch.outcomes.values() if isinstance(o, EpisodeAccepted)]
        payloads = self._payloads(batch)
        # In a thread: inside of a running loop Inspect replaces asyncio.run for good.
        rule = advantage_rule(self.config.training)
        await asyncio.to_thread(write_step, self.folder.path, step, groups, accepted, payloads, rule=rule)

    def _payloads(self, batch: Batch) -> dict[str, dict[str, Any]]:
        """By episode uuid; a client's own sample is not there."""
        samples, registered = self.samples, self.journal.registered
        if samples is None:
            return {}
        return {uuid: samples.payload_at(registered[uuid].position) for uuid in batch.outcomes}

    async def _learn(
        self, groups: list[RolloutGroup], step: int, lags: Mapping[int, int], batch: Batch
    ) -> dict[str, float]:
        """A step that is misaligned leaves a journal and a checkpoint from which the run can be resumed."""
        found_before = len(self.report.findings)
        try:
            metrics = await self.learner.update(groups, step=step, lags=lags)
        except AlignmentError as error:
            self.journal.write([Misaligned(step=step, episode_uuids=list(batch.outcomes), reason=str(error))])
            if self.step and not self.folder.has_checkpoint(self.step):
                await self._checkpoint()
            raise
        for finding in self.report.findings[found_before:]:
            self.watcher.note(f"step {step}: {finding['name']}: {finding['detail']}")
        return metrics

    def group(self, groups: Sequence[Group], lags: Counter[int | None]) -> list[RolloutGroup]:
        """The groups that train: each with at least `MIN_GROUP` episodes that are young enough."""
        found: list[RolloutGroup] = []
        for group in groups:
            young = [outcome for outcome in group.accepted if self._is_young(outcome, lags)]
            if len(young) >= MIN_GROUP:
                found.append(RolloutGroup(group.group_id, tuple(self._episode(o) for o in young)))
        return found

    def _is_young(self, outcome: EpisodeAccepted, lags: Counter[int | None]) -> bool:
        """Whether what sampled this episode may still train; counts its lag (None: weights that are gone)."""
        versions = {call.policy_version for call in outcome.calls} or {outcome.policy_version_at_claim}
        behind = [self._steps_of.get(version) for version in versions]
        lag = None if None in behind else self.step - min(steps for steps in behind if steps is not None)
        lags[lag] += 1
        if lag is not None and lag <= self.config.training.max_policy_lag:
            return True
        reason = "sampled by weights that are gone" if lag is None else f"{lag} steps old"
        self.journal.write([Discarded(episode_uuids=[outcome.episode_uuid], reason=reason)])
        return False

    def _episode(self, outcome: EpisodeAccepted) -> EpisodeRollouts:
        rollouts = merge_calls(outcome.calls, episode_uuid=outcome.episode_uuid)
        episode = EpisodeRollouts(
            outcome.episode_uuid, outcome.reward, rollouts, tuple(outcome.calls), outcome.metadata
        )
        self.report.add_episode(episode)
        return episode

    async def publish(self) -> None:
        """Make the current weights the next policy version, for every episode from now on."""
        self.source.publishing()
        version = await self.policy.publish(self.step)
        self._steps_of[version] = self.step
        self.journal.write([PolicyPublished(policy_version=version, step=self.step)])
        await self.source.publish(version, self.step)

    async def _checkpoint_if_due(self, step: int) -> None:
        training = self.config.training
        every = training.checkpoint_every
        if step != training.steps and (not every or step % every):
            return
        await self._checkpoint()

    async def _checkpoint(self) -> None:
        await self.learner.save_checkpoint(self.folder.checkpoint_name(self.step))
        self.journal.write(
            [
                Checkpointed(
                    step=self.step,
                    policy_version=self.policy.version,
                    report=self.report.as_json(),
                    train_seconds=self.train_seconds,
                )
            ]
        )
        self.folder.keep_checkpoints(self.config.training.keep_checkpoints)

    # Evaluation

    async def evaluate(self, label: str, count: int) -> None:
        """Score the current policy version; nothing is published meanwhile. Made once for each label."""
        made = self.evaluations.get(label)
        if made is not None and (label != "after" or made.step == self.step):
            return
        if not count or self.samples is None:
            return
        plans = self.samples.eval_episodes(label=label, count=count)
        batch = Batch(f"evaluation {label}", rule="groups", groups=count, group_size=1)
        await self.collector.open(batch, [plans])
        await self.collector.closed(batch, lambda n: [], 0)
        rewards = [o.reward for o in batch.outcomes.values() if isinstance(o, EpisodeAccepted)]
        evaluated = Evaluated(
            label=label,
            step=self.step,
            policy_version=self.policy.version,
            score=sum(rewards) / len(rewards) if rewards else None,
            accepted=len(rewards),
            failed=len(batch.outcomes) - len(rewards),
        )
        self.evaluations[label] = evaluated
        self.journal.write([evaluated])
        score = float("nan") if evaluated.score is None else evaluated.score
        metrics = {f"eval/{label}": score, "eval/score": score, "eval/failed": float(evaluated.failed)}
        tasks = self._tasks_of({plan.episode_uuid: plan.payload for plan in plans})
        metrics |= by_task(batch.outcomes.values(), tasks, "eval/score", tasks=self.samples.tasks)
        self.folder.log_metrics(metrics, step=self.step)
        self.watcher.evaluation(label, score, evaluated.accepted, evaluated.failed)

    @staticmethod
    def _tasks_of(payloads: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        return {uuid: payload["task"] for uuid, payload in payloads.items()}

    def step_metrics(
        self, batch: Batch, groups: Sequence[RolloutGroup], lags: Counter[int | None]
    ) -> dict[str, float]:
        outcomes = batch.outcomes
        accepted = [o for o in outcomes.values() if isinstance(o, EpisodeAccepted)]
        rewards = [o.reward for o in accepted]
        used = sum(len(group.episodes) for group in groups)
        stale = sum(lags.values()) - sum(n for lag, n in lags.items() if self._may_train(lag))
        return {
            "reward/mean": sum(rewards) / len(rewards) if rewards else float("nan"),
            "episodes/accepted": float(len(accepted)),
            "episodes/failed": float(len(outcomes) - len(accepted)),
            "episodes/retried": float(sum(bool(o.retries) for o in accepted)),
            "episodes/stale": float(stale),
            "episodes/used": float(used),
            "groups/trained": float(sum(group.rewards_differ for group in groups)),
            "groups/same_reward": float(sum(not group.rewards_differ for group in groups)),
            "groups/dropped": float(len(batch.groups) - len(groups)),
            "policy_version": float(self.policy.version),
            **{f"lag/{'gone' if lag is None else lag}": float(number) for lag, number in lags.items()},
            **reported(outcomes.values()),
        }

    def _may_train(self, lag: int | None) -> bool:
        return lag is not None and lag <= self.config.training.max_policy_lag
