"""GRPO, top to bottom: evaluate, then for every step collect groups, learn, publish; evaluate again.

Group Relative Policy Optimization: Shao et al. 2024, "DeepSeekMath". An episode's advantage is its
reward minus the mean reward of its group; a failed episode has no reward and is left out of its group.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.watcher import Watcher
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.types import Episode, RolloutGroup
from tinkerscript.train.journal import (
    EpisodeAccepted,
    EpisodeRegistered,
    Journal,
    Outcome,
    PolicyPublished,
    StepConsumed,
)
from tinkerscript.train.learner import Learner
from tinkerscript.train.policy import Policy
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.source import EpisodeSource, PlannedEpisode

MIN_GROUP = 2
"""Accepted episodes that a group needs to train; a smaller one is dropped and counted."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of one policy version on samples that never train."""

    label: str
    policy_version: int
    score: float
    """Mean reward over the accepted episodes."""

    accepted: int
    failed: int
    """Episodes without a score: reported beside it, never averaged into it."""


@dataclass
class GRPO:
    """One training run. `source` runs the episodes, `learner` updates the weights."""

    config: RunConfig
    folder: RunFolder
    samples: TaskSamples
    source: EpisodeSource
    policy: Policy
    learner: Learner
    journal: Journal
    report: AlignmentReport
    watcher: Watcher
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    train_seconds: float = 0.0

    async def run(self) -> None:
        """The whole run. Cancelling it leaves the run folder as of the last finished step."""
        steps = self.config.training.steps
        await self.publish(step=0)
        await self.evaluate("before", self.config.evaluation.episodes)
        started = time.monotonic()
        for step in range(1, steps + 1):
            await self.train_step(step)
            every = self.config.evaluation.every_steps
            if every and step % every == 0 and step < steps:
                await self.evaluate(f"step-{step}", self.config.evaluation.interim_episodes)
        self.train_seconds = time.monotonic() - started
        await self.evaluate("after", self.config.evaluation.episodes)

    async def train_step(self, step: int) -> None:
        """Collect, learn, publish; the step's metrics and rollouts go to the run folder."""
        training = self.config.training
        plans = self.samples.train_groups(
            step=step, groups=training.groups_per_step, group_size=training.group_size
        )
        began = time.monotonic()
        outcomes = await self.collect([episode for group in plans for episode in group], label=f"step {step}")
        groups = self.group(plans, outcomes)
        collected = time.monotonic()
        metrics = await self.learner.update(groups, step=step)
        await self.publish(step=step)
        learned = time.monotonic()
        self.journal.write([StepConsumed(step=step, episode_uuids=list(outcomes))])
        metrics |= self.step_metrics(plans, outcomes, groups)
        metrics["time/rollout_s"], metrics["time/train_s"] = collected - began, learned - collected
        metrics["episodes_per_s"] = len(outcomes) / (learned - began)
        self.folder.write_rollouts(f"step_{step:04d}", groups, outcomes)
        self.folder.log_metrics(metrics, step=step)
        self.watcher.step(step, metrics)

    async def evaluate(self, label: str, count: int) -> None:
        """Score the current policy version; nothing is published meanwhile."""
        if not count:
            return
        plans = self.samples.eval_episodes(label=label, count=count)
        outcomes = await self.collect(plans, label=f"evaluation {label}")
        rewards = [o.reward for o in outcomes.values() if isinstance(o, EpisodeAccepted)]
        score = sum(rewards) / len(rewards) if rewards else float("nan")
        failed = len(outcomes) - len(rewards)
        evaluation = Evaluation(label, self.policy.version, score, len(rewards), failed)
        self.evaluations.append(evaluation)
        self.folder.log_metrics(
            {f"eval/{label}": score, "eval/score": score, "eval/failed": float(failed)},
            step=self.policy.version,
        )
        self.watcher.evaluation(label, score, len(rewards), failed)

    async def collect(self, plans: Sequence[PlannedEpisode], *, label: str) -> dict[str, Outcome]:
        """Run `plans` and journal every outcome before it is acknowledged, by episode uuid."""
        self.journal.write(
            EpisodeRegistered(
                episode_uuid=plan.episode_uuid, episode_type=plan.episode_type, group_id=plan.group_id
            )
            for plan in plans
        )
        outcomes: dict[str, Outcome] = {}
        with self.watcher.phase(label, total=len(plans)) as phase:
            async for batch in self.source.run(plans):
                self.journal.write(batch)
                self.source.acknowledge(batch)
                outcomes.update({outcome.episode_uuid: outcome for outcome in batch})
                phase.advance(len(batch))
        return outcomes

    def group(
        self, plans: Sequence[Sequence[PlannedEpisode]], outcomes: dict[str, Outcome]
    ) -> list[RolloutGroup]:
        """The groups that train: each with at least `MIN_GROUP` accepted episodes."""
        members: dict[str, list[Episode]] = defaultdict(list)
        for plan in (plan for group in plans for plan in group):
            outcome = outcomes[plan.episode_uuid]
            if isinstance(outcome, EpisodeAccepted):
                members[plan.group_id].append(self._episode(outcome))
        return [RolloutGroup(name, tuple(es)) for name, es in members.items() if len(es) >= MIN_GROUP]

    def _episode(self, outcome: EpisodeAccepted) -> Episode:
        rollouts = merge_calls(outcome.calls, episode_uuid=outcome.episode_uuid)
        episode = Episode(
            outcome.episode_uuid, outcome.reward, rollouts, tuple(outcome.calls), outcome.metadata
        )
        self.report.add_episode(episode)
        return episode

    async def publish(self, *, step: int) -> None:
        """Make the current weights the next policy version, for every episode from now on."""
        version = await self.policy.publish()
        self.journal.write([PolicyPublished(policy_version=version)])
        await self.source.publish(version, step)

    def step_metrics(
        self,
        plans: Sequence[Sequence[PlannedEpisode]],
        outcomes: dict[str, Outcome],
        groups: Sequence[RolloutGroup],
    ) -> dict[str, float]:
        accepted = [o for o in outcomes.values() if isinstance(o, EpisodeAccepted)]
        rewards = [o.reward for o in accepted]
        return {
            "reward/mean": sum(rewards) / len(rewards) if rewards else float("nan"),
            "episodes/accepted": float(len(accepted)),
            "episodes/failed": float(len(outcomes) - len(accepted)),
            "episodes/retried": float(sum(bool(o.retries) for o in accepted)),
            "groups/trained": float(sum(group.rewards_differ for group in groups)),
            "groups/same_reward": float(sum(not group.rewards_differ for group in groups)),
            "groups/dropped": float(len(plans) - len(groups)),
            "policy_version": float(self.policy.version),
        }
