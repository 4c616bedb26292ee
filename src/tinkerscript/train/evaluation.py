"""`Evaluator`: scores of a policy version on held-out samples.

Invariant: each label is evaluated once per run, even across restarts, and failed episodes are reported beside
the score, never averaged into it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from tinkerscript.ledger.health import margin_of
from tinkerscript.ledger.rows import EvaluationRow, TrainedRow, Use
from tinkerscript.rollouts.call import calls_of
from tinkerscript.train.collector import Batch, Collector
from tinkerscript.train.inspect_logs import write_logs
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.pass_rates import by_sample, pass_metrics
from tinkerscript.train.policy import Policy
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_metrics import by_task
from tinkerscript.train.step_rows import metric_rows
from tinkerscript.trainer_link.messages import EpisodeAccepted


@dataclass
class Evaluator:
    """Evaluates before, during and after training. Do not publish while an evaluation runs."""

    parts: OpenRun
    samples: TaskSamples | None
    """None: clients register their own samples, and nothing is evaluated."""

    collector: Collector
    policy: Policy
    roles: Sequence[str] = ()
    """Roles that train: their mean rewards are logged too."""

    def __post_init__(self) -> None:
        self.config = self.parts.config.evaluation
        self.finished = {each.label: each for each in self.parts.history.evaluations}
        """By label."""

    async def before(self, step: int) -> None:
        await self._evaluate("before", step, self.config.episodes)

    async def during(self, step: int, *, steps: int) -> None:
        """If `every_steps` says so, after `step` of `steps`."""
        every = self.config.every_steps
        if every and step % every == 0 and 0 < step < steps:
            await self._evaluate(f"step-{step}", step, self.config.interim_episodes)

    async def after(self, step: int) -> None:
        """Evaluates again if the run has been extended since."""
        if (done := self.finished.get("after")) and done.step != step:
            del self.finished["after"]
        await self._evaluate("after", step, self.config.episodes)

    def best_of(self, steps: Collection[int]) -> int | None:
        """The one of these steps with the highest score so far; None if none has a score."""
        scored = [(each.score, each.step) for each in self.finished.values() if each.score is not None]
        return max((each for each in scored if each[1] in steps), default=(0.0, None))[1]

    async def _evaluate(self, label: str, step: int, count: int) -> None:
        if label in self.finished or not count or self.samples is None:
            return
        attempts = self.config.attempts
        plans = self.samples.eval_episodes(label=label, count=count, attempts=attempts)
        batch = Batch(f"evaluation {label}")
        await self.collector.open(batch, [plans], step=step)
        await self.collector.until(lambda: batch.is_over, batch)
        batch.check_success()
        accepted = [o for o in batch.outcomes.values() if isinstance(o, EpisodeAccepted)]
        rewards = [outcome.reward for outcome in accepted]
        means = [fmean(each.reward for each in sample) for sample in by_sample(accepted)]
        independent = rewards if attempts == 1 else means  # Attempts at one sample are not.
        role_scores = _role_scores(self.roles, accepted)
        evaluated = EvaluationRow(
            label=label,
            step=step,
            time=time.time(),
            policy_version=self.policy.version,
            score=sum(rewards) / len(rewards) if rewards else None,
            margin=margin_of(independent) if len(independent) > 1 else None,
            accepted=len(rewards),
            failed=len(batch.outcomes) - len(rewards),
            role_scores=msgspec.json.encode(role_scores),
        )
        self.finished[label] = evaluated
        used = [
            TrainedRow(episode=each.sequence, step=step, outcome=Use.EVALUATED)
            for each in batch.outcomes.values()
        ]
        score = float("nan") if evaluated.score is None else evaluated.score
        metrics = {f"eval/{label}": score, "eval/score": score, "eval/failed": float(evaluated.failed)}
        metrics |= pass_metrics(accepted, attempts, self.parts.config.training.curriculum.pass_reward)
        metrics |= {f"role/{role}/eval/score": mean for role, mean in role_scores.items()}
        payloads = {plan.episode_uuid: plan.payload for plan in plans}
        task_of = {uuid: payload["task"] for uuid, payload in payloads.items()}
        metrics |= by_task(batch.outcomes.values(), task_of, "eval/score", tasks=self.samples.tasks)
        await self.parts.ledger.commit([evaluated, *used, *metric_rows(step, metrics)])
        if self.parts.config.training.inspect_log_every:
            path = self.parts.folder.path
            await asyncio.to_thread(write_logs, path, f"eval-{label}", step, [], accepted, payloads)
        self.parts.folder.log_metrics(metrics, step=step)
        self.parts.progress.evaluation(label, score, evaluated.accepted, evaluated.failed)


def _role_scores(roles: Sequence[str], accepted: Sequence[EpisodeAccepted]) -> dict[str, float]:
    """By role: its mean reward over the episodes that called it."""
    rewards = {
        role: [each.reward_of(role) for each in accepted if calls_of(each.all_calls, role)] for role in roles
    }
    return {role: sum(each) / len(each) for role, each in rewards.items() if each}
