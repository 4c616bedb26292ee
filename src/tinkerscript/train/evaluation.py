"""`Evaluator`: scores policy versions on held-out samples.

Each label is evaluated once per run, by one version, even across restarts. Failed episodes are never averaged
into a score (docs/training.md#evaluation).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean

import msgspec

from tinkerscript.dashboard.progress import PendingEvaluation
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.health import margin_of
from tinkerscript.ledger.rows import EvaluationRow, TrainedRow, Use
from tinkerscript.rollouts.call import calls_of
from tinkerscript.train.collector import Batch, Collector
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.pass_rates import by_sample, pass_metrics
from tinkerscript.train.policy import Policy
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_metrics import by_task
from tinkerscript.train.step_rows import metric_rows
from tinkerscript.trainer_link.messages import EpisodeAccepted


@dataclass(eq=False)
class RunningEvaluation:
    label: str
    step: int
    policy_version: int
    plans: Sequence[PlannedEpisode]
    waiting: deque[PlannedEpisode]
    batch: Batch
    pin: ExitStack
    is_awaited: bool = False

    @property
    def in_flight(self) -> int:
        return len(self.plans) - len(self.waiting) - self.batch.ended

    @property
    def is_over(self) -> bool:
        return not self.waiting and not self.in_flight


@dataclass
class Evaluator:
    parts: OpenRun
    samples: TaskSamples | None
    """None: clients register samples, and nothing is evaluated."""

    collector: Collector
    policy: Policy
    roles: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.config = self.parts.config.evaluation
        self.finished = {each.label: each for each in self.parts.history.evaluations}
        self._begun = list[RunningEvaluation]()  # Oldest first.
        self._started = 0

        self._finishing = asyncio.Lock()
        self._failure: NoSuccessError | None = None

    async def run(self) -> None:
        """Evaluate; the loop raises a NoSuccessError between steps."""
        try:
            while True:
                before = self.collector.received
                for each in self._begun:
                    each.batch.check_success(self.collector.source.own_clients)
                await self._start()
                await self._finish()
                await self.collector.received_more(before)
        except NoSuccessError as error:
            self._failure = error
        except Exception as error:
            self.collector.fail(error)
            raise

    async def before(self, step: int) -> None:
        await self._begin("before", step, self.config.episodes)
        await self._wait()

    async def during(self, step: int, *, steps: int) -> None:
        """Start a due evaluation, and wait until the sampler can hold all unfinished versions."""
        if self.is_due(step, steps=steps):
            await self._begin(f"step-{step}", step, self.config.interim_episodes)
        await self._wait(at_most=self.policy.holds)

    async def again(self, step: int) -> None:
        """The newest weights must belong to `step`."""
        await self._begin(f"step-{step}", step, self.config.interim_episodes)

    async def after(self, step: int) -> None:
        """Evaluate the final weights, again if the run was extended."""
        if (done := self.finished.get("after")) and done.step != step:
            del self.finished["after"]
        await self._begin("after", step, self.config.episodes)
        await self._wait()

    def is_due(self, step: int, *, steps: int) -> bool:
        every = self.config.every_steps
        is_done = f"step-{step}" in self.finished
        is_on = every > 0 and self.samples is not None
        return is_on and step % every == 0 and 0 < step < steps and not is_done

    def runs_beside(self, step: int, *, steps: int) -> bool:
        """Overlap with later steps needs both weights to resume."""
        return self.is_due(step, steps=steps) and self.policy.holds > 0

    def needed(self, steps: Collection[int]) -> set[int]:
        scored = [(each.score, each.step) for each in self.finished.values() if each.score is not None]
        best = max((each for each in scored if each[1] in steps), default=None)
        return {each.step for each in self._begun} | ({best[1]} if best else set[int]())

    async def _begin(self, label: str, step: int, count: int) -> None:
        if label in self.finished or not count or self.samples is None:
            return
        attempts = self.config.attempts
        plans = self.samples.eval_episodes(label=label, count=count, attempts=attempts)
        pin = ExitStack()
        version = pin.enter_context(self.policy.pinned([plan.episode_uuid for plan in plans]))
        batch = Batch(f"evaluation {label}")
        self._begun.append(RunningEvaluation(label, step, version, plans, deque(plans), batch, pin))
        self._tell()

    async def _wait(self, *, at_most: int = 0) -> None:
        while len(self._begun) > at_most or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            first, *_ = awaited = self._begun[: len(self._begun) - at_most]
            for each in awaited:
                each.is_awaited = True
            await self._start()
            # A later evaluation may end first.
            await self.collector.until(lambda: self._unfinished <= at_most, first.batch)
            await self._finish()
        await self._start()

    @property
    def _unfinished(self) -> int:
        return sum(not each.is_over for each in self._begun)

    async def _start(self) -> None:
        for each in list(self._begun):
            if each.is_awaited:
                await self._open(each, len(each.waiting))
            elif len(each.waiting) == len(each.plans):
                await self._open(each, 1)  # Tells a resumed run that the evaluation has begun.
            while each.waiting and (room := self._room):
                await self._open(each, room)

    async def _open(self, evaluation: RunningEvaluation, number: int) -> None:
        plans = [evaluation.waiting.popleft() for _ in range(min(number, len(evaluation.waiting)))]
        self._started += 0 if evaluation.is_awaited else len(plans)
        if plans:
            await self.collector.open(evaluation.batch, [plans], step=evaluation.step)

    @property
    def _room(self) -> int:
        # Fast episodes would exceed a share of the running ones, so a share of the finished ones limits them
        # too.
        share = self.config.share
        at_once = max(1, int(share * self.collector.held.number))
        in_all = 1 + (share / (1 - share) * self.collector.rollouts if share < 1 else math.inf)
        in_flight = sum(each.in_flight for each in self._begun)
        return max(0, int(min(at_once - in_flight, max(in_all - self._started, 0))))

    async def _finish(self) -> None:
        async with self._finishing:
            for each in [each for each in self._begun if each.is_over]:
                await self._finish_one(each)
            self._tell()

    async def _finish_one(self, evaluation: RunningEvaluation) -> None:
        label, step, batch = evaluation.label, evaluation.step, evaluation.batch
        batch.check_success()
        accepted = [o for o in batch.outcomes.values() if isinstance(o, EpisodeAccepted)]
        rewards = [outcome.reward for outcome in accepted]
        means = [fmean(each.reward for each in sample) for sample in by_sample(accepted)]
        attempts = self.config.attempts
        independent = rewards if attempts == 1 else means  # Attempts at one sample are correlated.
        role_scores = _role_scores(self.roles, accepted)
        evaluated = EvaluationRow(
            label=label,
            step=step,
            time=time.time(),
            policy_version=evaluation.policy_version,
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
        payloads = {plan.episode_uuid: plan.payload for plan in evaluation.plans}
        task_of = {uuid: payload["task"] for uuid, payload in payloads.items()}
        tasks = self.samples.tasks if self.samples else []
        metrics |= by_task(batch.outcomes.values(), task_of, "eval/score", tasks=tasks)
        await self.parts.ledger.commit([evaluated, *used, *metric_rows(step, metrics)])
        self._begun.remove(evaluation)
        evaluation.pin.close()
        if self.parts.config.training.inspect_log_every:
            from tinkerscript.train.inspect_logs import write_logs

            path = self.parts.folder.path
            await asyncio.to_thread(write_logs, path, f"eval-{label}", step, [], accepted, payloads)
        self.parts.folder.log_metrics(metrics, step=step)
        self.parts.progress.evaluation(label, score, evaluated.accepted, evaluated.failed)

    def _tell(self) -> None:
        self.parts.progress.pending(
            [
                PendingEvaluation(each.label, each.step, each.batch.ended, len(each.plans))
                for each in self._begun
            ]
        )


def _role_scores(roles: Sequence[str], accepted: Sequence[EpisodeAccepted]) -> dict[str, float]:
    rewards = {
        role: [each.reward_of(role) for each in accepted if calls_of(each.all_calls, role)] for role in roles
    }
    return {role: sum(each) / len(each) for role, each in rewards.items() if each}
