"""`StepLog`: rows, metrics, rollouts, Inspect logs and notes of a step. It only observes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkerscript.errors import AlignmentError, ConfigError, StoreError
from tinkerscript.ledger.health import health_rows
from tinkerscript.ledger.rows import StepRow, TrainerRow, Use
from tinkerscript.rollouts.alignment import constrained_share
from tinkerscript.train.backends.backend import skipped_note
from tinkerscript.train.learner import Learner
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
from tinkerscript.train.step_rows import finding_row, finding_rows, metric_rows
from tinkerscript.train.stream import TrainingStep

CONSTRAINED_OUTCOMES = {
    "mask": "they carry no loss",
    "train": "they train as if the policy had chosen them freely",
    "refuse": "their sequences do not train",
}

# Health rows that get a note when they turn bad.
WORTH_A_NOTE = frozenset({"held_out", "reward", "length", "cut_off"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredStep:
    facts: StepFacts
    metrics: dict[str, float]
    learned: Sequence[Mapping[str, float]]
    rows: list[TrainerRow]


class StepLog:
    def __init__(
        self,
        parts: OpenRun,
        samples: TaskSamples | None,
        learners: Sequence[Learner],
        extra_metrics: Sequence[StepMetric] = (),
    ) -> None:
        self._config, self._folder = parts.config, parts.folder
        self._progress, self._ledger, self._reader = parts.progress, parts.ledger, parts.reader
        self._samples = samples
        self._own, *self._roles = self._learners = list(learners)
        self._extra = extra_metrics
        self._broken = set[str]()
        self._findings = [len(each.report.findings) for each in learners]

        # Role (empty: the main policy) -> steps in a row without training.
        self._untrained = Counter[str]()

        self._bad = frozenset[str]()

    def measured(self, step: TrainingStep, learned: Sequence[Mapping[str, float]]) -> MeasuredStep:
        facts = self._facts(step)
        metrics = {**self._measured_by_others(step.number, facts), **learned[0]}
        for each, found in zip(self._roles, learned[1:], strict=True):
            alignment = each.report.step.metrics()
            metrics |= role_metrics(
                each.role,
                each.groups,
                found,
                alignment,
                trains_equal=each.trains_equal,
                differs=each.differs,
            )
        metrics |= step_metrics(facts) | self._own.report.step.metrics()
        return MeasuredStep(facts, metrics, learned, self._rows(step, metrics))

    def _measured_by_others(self, step: int, facts: StepFacts) -> dict[str, float]:
        """Failures are only reported, because the weights have changed."""
        found = dict[str, float]()
        for metric in self._extra:
            try:
                found |= {str(name): float(value) for name, value in metric(facts).items()}
            except Exception as error:
                name = getattr(metric, "__qualname__", repr(metric))
                logger.warning("metrics.extra_failed step=%d name=%s", step, name, exc_info=True)
                if name not in self._broken:
                    self._broken.add(name)
                    failure = f"{type(error).__name__}: {error}"
                    self._progress.note(f"step {step}: metrics.extra: {name} failed: {failure}")
        return found

    async def finished(self, step: TrainingStep, measured: MeasuredStep) -> None:
        self.tell_findings(step.number)
        self.tell_constrained(step.number)
        metrics, facts = measured.metrics, measured.facts
        for each in self._learners:
            name = f"step_{step.number:04d}" + (f".{each.role}" if each.role else "")
            uncalled = [outcome.episode_uuid for outcome in facts.accepted if not each.has_part_in(outcome)]
            why = {**dict.fromkeys(uncalled, f"it did not call {each.role}"), **step.stale}
            self._folder.write_rollouts(name, each.groups, step.batch.outcomes, each.rule, why)
        await self._log_for_inspect(step, facts)
        self._folder.log_metrics(metrics, step=step.number)
        self._folder.write_json(ALIGNMENT_FILE, self.alignment())
        await asyncio.to_thread(self._folder.draw_curve)
        self._progress.step(step.number, metrics)
        self._tell_idle(step, why_nothing_trained(facts, metrics, self._own.report.step.errors))
        for each, found in zip(self._roles, measured.learned[1:], strict=True):
            why, errors = "", each.report.step.errors
            if not found["train/sequences"]:
                why = why_groups_do_not_train(
                    each.groups, trains_equal=each.trains_equal, errors=errors, differs=each.differs
                )
            self._tell_idle(step, why, each.role)
        if skipped := skipped_note(step.number, metrics):
            self._progress.note(skipped)

    def stopped(self, step: TrainingStep, error: AlignmentError) -> list[TrainerRow]:
        self.tell_findings(step.number)
        metrics = step_metrics(self._facts(step)) | self._own.report.step.metrics()
        return self._rows(step, metrics, stopped=error.name)

    def _rows(
        self, step: TrainingStep, metrics: Mapping[str, float], *, stopped: str = ""
    ) -> list[TrainerRow]:
        row = StepRow(
            step=step.number,
            time=time.time(),
            policy_version=step.policy_version,
            reward=metrics.get("reward/mean"),
            accepted=int(metrics["episodes/accepted"]),
            failed=int(metrics["episodes/failed"]),
            trained=sum(
                self._own.outcome_of(group, episode) == Use.TRAINED
                for group in self._own.groups
                for episode in group.episodes
            ),
            max_lag=step.max_lag,
            stopped=stopped,
        )
        return [row, *metric_rows(step.number, metrics), *finding_rows(step.number, self._learners)]

    def alignment(self) -> dict[str, Any]:
        roles = {each.role: each.report.as_json() for each in self._roles}
        return {**self._own.report.as_json(), **({"roles": roles} if roles else {})}

    async def tell_health(self, step: int) -> None:
        if self._reader is None:
            return
        try:
            rows = await asyncio.to_thread(health_rows, self._reader)
        except (ConfigError, StoreError) as error:  # Training needs no readable database.
            logger.warning("health.not_read %s", error)
            return
        bad = [row for row in rows if row.kind == "bad" and row.name in WORTH_A_NOTE]
        for row in bad:
            if row.name not in self._bad:
                self._progress.note(f"step {step}: {row.line()}")
        self._bad = frozenset(row.name for row in bad)

    def tell_findings(self, step: int) -> None:
        for place, each in enumerate(self._learners):
            for finding in each.report.findings[self._findings[place] :]:
                detail = f"role {each.role}: {finding['detail']}" if each.role else str(finding["detail"])
                self._progress.note(f"step {step}: {finding['name']}: {detail}")
                self._ledger.note([finding_row(step, str(finding["name"]), detail)])
            self._findings[place] = len(each.report.findings)

    def tell_constrained(self, step: int) -> None:
        report = self._own.report
        found = report.step.constrained.total()
        if found and found == report.whole.constrained.total():
            policy = self._config.training.constrained_tokens
            self._progress.note(
                f"step {step}: {constrained_share(report.step)}; {CONSTRAINED_OUTCOMES[policy]} "
                f"(training.constrained_tokens: {policy})"
            )

    def _tell_idle(self, step: TrainingStep, reason: str, role: str = "") -> None:
        self._untrained[role] = self._untrained[role] + 1 if reason else 0
        if self._untrained[role] % 10 == 1:
            of_role = f"role {role}: " if role else ""
            self._progress.note(f"step {step.number} trained nothing: {of_role}{reason}")

    def _facts(self, step: TrainingStep) -> StepFacts:
        return StepFacts(
            batch=step.batch,
            groups=self._own.groups,
            lags=step.lags,
            stale=step.stale,
            trains_equal=self._own.trains_equal,
            differs=self._own.differs,
            policy_version=step.policy_version,
            cancelled=step.cancelled,
            tasks=self._samples.tasks if self._samples else [],
            task_of={uuid: payload["task"] for uuid, payload in step.batch.payloads.items()},
            rollout_s=step.collected - step.began,
            train_s=time.monotonic() - step.collected,
            publish_s=step.publish_s,
            wait_stale_s=step.wait_stale_s,
            sampling_share=step.sampling_share,
        )

    async def _log_for_inspect(self, step: TrainingStep, facts: StepFacts) -> None:
        every = self._config.training.inspect_log_every
        if not every or step.number % every:
            return
        from tinkerscript.train.inspect_logs import write_logs

        # Inspect replaces asyncio.run for good if called inside a running event loop.
        path, label, rule = self._folder.path, f"step-{step.number:04d}", self._own.rule
        await asyncio.to_thread(
            write_logs,
            path,
            label,
            step.number,
            facts.groups,
            facts.accepted,
            step.batch.payloads,
            rule=rule,
        )
