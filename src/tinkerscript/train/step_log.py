"""`StepLog`: what a training step leaves for people: metrics, rollouts, Inspect logs, the record, notes.

Invariant: it only looks on. Nothing here decides what trains, and a resumed run needs none of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.alignment import constrained_share
from tinkerscript.train.backends.backend import skipped_note
from tinkerscript.train.collector import Batch
from tinkerscript.train.inspect_logs import write_logs
from tinkerscript.train.learner import Learner
from tinkerscript.train.off_policy import AcceptedGroup, Lags
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.run_folder import ALIGNMENT_FILE
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_metrics import (
    StepFacts,
    StepMetric,
    role_metrics,
    step_metrics,
    why_groups_do_not_train,
    why_nothing_trained,
)

CONSTRAINED_OUTCOMES = {
    "mask": "they carry no loss",
    "train": "they train as if the policy had chosen them freely",
    "refuse": "their sequences do not train",
}
"""What `training.constrained_tokens` does, for people."""

WORTH_A_NOTE = frozenset({"held_out", "reward", "length", "cut_off"})
"""Rows of the run's health that get a note once they are bad: the others have one already."""


@dataclass
class TrainingStep:
    """One training step, from a full batch to published weights."""

    number: int
    batch: Batch
    groups: list[AcceptedGroup]
    """Those with enough episodes that are fresh enough."""

    lags: Lags
    """Of the batch's episodes, of replayed ones, and of batches before it that were stale as a whole."""

    stale: Mapping[str, str]
    """Uuid of each episode that was too old -> why."""

    began: float
    """When its batch began to be collected, on the monotonic clock; so in the next field."""

    collected: float = field(default_factory=time.monotonic)
    policy_version: int = -1
    """What the step published; before that, the version that it began with."""

    publish_s: float = 0.0
    cancelled: int = 0
    """Episodes that the batch had no use for when it closed."""

    @property
    def max_lag(self) -> int | None:
        return max((lag for lag in self.lags if lag is not None), default=None)


class StepLog:
    """Writes down the steps of one run."""

    def __init__(
        self,
        parts: OpenRun,
        samples: TaskSamples | None,
        learners: Sequence[Learner],
        extra_metrics: Sequence[StepMetric] = (),
    ) -> None:
        self._config, self._folder = parts.config, parts.folder
        self._progress, self._recorder = parts.progress, parts.recorder
        self._samples = samples
        self._own, *self._roles = self._learners = list(learners)
        self._extra = extra_metrics
        self._findings = [len(each.report.findings) for each in learners]
        """Findings of each policy that people have been told."""

        self._untrained = Counter[str]()
        """By role (empty: the run's own policy): steps in a row, up to the last one, that trained nothing."""

        self._bad = frozenset[str]()
        """Rows of the run's health that were bad after the last step."""

    async def finished(self, step: TrainingStep, learned: Sequence[Mapping[str, float]]) -> None:
        """The step trained. `learned`: the metrics of each policy's update."""
        self.tell_findings(step.number)
        self.tell_constrained(step.number)
        payloads = step.batch.payloads
        facts = self._facts(step, payloads)
        metrics = dict(learned[0])
        for each, found in zip(self._roles, learned[1:], strict=True):
            metrics |= role_metrics(each.role, each.groups, found, each.report.step.metrics())
        metrics |= step_metrics(facts, self._extra) | self._own.report.step.metrics()
        for each in self._learners:
            name = f"step_{step.number:04d}" + (f".{each.role}" if each.role else "")
            self._folder.write_rollouts(name, each.groups, step.batch.outcomes, each.rule)
        await self._log_for_inspect(step, facts, payloads)
        self._folder.log_metrics(metrics, step=step.number)
        self._record(step, metrics)
        self._folder.write_json(ALIGNMENT_FILE, self.alignment())
        await asyncio.to_thread(self._folder.draw_curve)
        self._progress.step(step.number, metrics)
        self._tell_idle(step, why_nothing_trained(facts, metrics, self._own.report.step.errors))
        for each, found in zip(self._roles, learned[1:], strict=True):
            is_idle = not found["train/sequences"]
            why = why_groups_do_not_train(each.groups, errors=each.report.step.errors) if is_idle else ""
            self._tell_idle(step, why, each.role)
        if skipped := skipped_note(step.number, metrics):
            self._progress.note(skipped)

    def stopped(self, step: TrainingStep, error: AlignmentError) -> None:
        """The step ends the run: it is in the record, where whoever looks for the cause looks."""
        self.tell_findings(step.number)
        facts = self._facts(step, step.batch.payloads)
        metrics = step_metrics(facts) | self._own.report.step.metrics()
        self._record(step, metrics, stopped=error.name)

    def alignment(self) -> dict[str, Any]:
        """The contents of alignment.json."""
        roles = {each.role: each.report.as_json() for each in self._roles}
        return {**self._own.report.as_json(), **({"roles": roles} if roles else {})}

    async def tell_health(self, step: int) -> None:
        """Say what has become bad, while there is still something to save."""
        rows = await asyncio.to_thread(self._recorder.health)
        bad = [row for row in rows if row.kind == "bad" and row.name in WORTH_A_NOTE]
        for row in bad:
            if row.name not in self._bad:
                self._progress.note(f"step {step}: {row.told()}")
        self._bad = frozenset(row.name for row in bad)

    def tell_findings(self, step: int) -> None:
        """The findings that are new in each policy's report."""
        for place, each in enumerate(self._learners):
            for finding in each.report.findings[self._findings[place] :]:
                detail = f"role {each.role}: {finding['detail']}" if each.role else str(finding["detail"])
                self._progress.note(f"step {step}: {finding['name']}: {detail}")
                self._recorder.finding(step, str(finding["name"]), detail)
            self._findings[place] = len(each.report.findings)

    def tell_constrained(self, step: int) -> None:
        """Once in a run: at the first step that has constrained tokens."""
        report = self._own.report
        found = report.step.constrained.total()
        if found and found == report.whole.constrained.total():
            policy = self._config.training.constrained_tokens
            self._progress.note(
                f"step {step}: {constrained_share(report.step)}; {CONSTRAINED_OUTCOMES[policy]} "
                f"(training.constrained_tokens: {policy})"
            )

    def _tell_idle(self, step: TrainingStep, reason: str, role: str = "") -> None:
        """Warn at the first of several steps in a row that trained nothing, and at every tenth."""
        self._untrained[role] = self._untrained[role] + 1 if reason else 0
        if self._untrained[role] % 10 == 1:
            of_role = f"role {role}: " if role else ""
            self._progress.note(f"step {step.number} trained nothing: {of_role}{reason}")

    def _record(self, step: TrainingStep, metrics: Mapping[str, float], *, stopped: str = "") -> None:
        self._recorder.step(
            step.number,
            outcomes=step.batch.outcomes,
            trained=self._learners,
            metrics=metrics,
            max_lag=step.max_lag,
            stale=step.stale,
            stopped=stopped,
        )

    def _facts(self, step: TrainingStep, payloads: Mapping[str, Mapping[str, Any]]) -> StepFacts:
        return StepFacts(
            batch=step.batch,
            groups=self._own.groups,
            lags=step.lags,
            max_policy_lag=self._config.training.max_policy_lag,
            distills=bool(self._config.training.distillation.teacher),
            policy_version=step.policy_version,
            cancelled=step.cancelled,
            tasks=self._samples.tasks if self._samples else [],
            task_of={uuid: payload["task"] for uuid, payload in payloads.items()},
            rollout_s=step.collected - step.began,
            train_s=time.monotonic() - step.collected,
            publish_s=step.publish_s,
        )

    async def _log_for_inspect(
        self, step: TrainingStep, facts: StepFacts, payloads: Mapping[str, Mapping[str, Any]]
    ) -> None:
        every = self._config.training.inspect_log_every
        if not every or step.number % every:
            return
        # In a thread: inside a running event loop, Inspect replaces asyncio.run for good.
        path, label, rule = self._folder.path, f"step-{step.number:04d}", self._own.rule
        await asyncio.to_thread(
            write_logs, path, label, step.number, facts.groups, facts.accepted, payloads, rule=rule
        )
