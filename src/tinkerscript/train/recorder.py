"""`RunRecorder`: tells a run's record (`record/`) what happens: episodes, steps, evaluations, metrics, waits.

Invariant: it only looks on. A run that is not recorded, or whose record fails, trains the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import tinker

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import Phase, ProgressReporter
from tinkerscript.ledger.rows import EvaluationRow, Use
from tinkerscript.lifecycle import ProcessId
from tinkerscript.record.entries import (
    EpisodeDetail,
    RecordedEpisode,
    TokenUse,
    TrainedEpisode,
    TrainedSequence,
)
from tinkerscript.record.health import HealthRow, health_rows
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.rollouts.advantages import AdvantageRule, RolloutGroup
from tinkerscript.rollouts.call import FloatArray, pack_ids, pack_logprobs
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.train.learner import Compared, Learner
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome

logger = logging.getLogger(__name__)

MAX_FINDINGS = 200
"""Findings with their episodes that a step records."""


@contextmanager
def recorded(
    config: RunConfig, folder: Path, progress: ProgressReporter
) -> Generator[tuple[RunRecorder, ProgressReporter]]:
    """Record the run in `folder` while the context is open: what it does, how it ends, and what `progress`
    shows. `RunRecorder.resume` has to be called before its first episode."""

    def failed(reason: str) -> None:
        progress.note(f"{RECORD_FILE} is not written any more, and the run goes on without it: {reason}")

    with RecordWriter(
        folder / RECORD_FILE, limit_mb=config.recording_limit_mb, failed=failed, note=progress.note
    ) as writer:
        writer.status(
            state="running",
            process=ProcessId.own(),
            failure="",
            method=config.method,
            phase=None,
            waiting_for="",
            name=folder.name,
            model=config.engine.model,
            tasks=[task.name for task in config.all_tasks],
            recording=config.recording,
            config=config.model_dump(mode="json"),
            began=time.time(),
        )
        recorder = RunRecorder(writer, config.recording)
        with recorder.saying_how_it_ends():
            yield recorder, RecordedProgress(progress, writer)
    if writer.dropped and not writer.failure:
        progress.note(f"{RECORD_FILE} lacks {writer.dropped} entries that could not be written")


@dataclass(frozen=True, slots=True)
class _Expected:
    step: int
    label: str
    payload: Mapping[str, Any]


class RunRecorder:
    """Everything that a run says of itself, as entries of its record."""

    def __init__(self, writer: RecordWriter, recording: str) -> None:
        """`recording`: the config's."""
        self._writer = writer
        self._step = 0
        """The last one."""

        self._every = 0 if recording == "off" else int(recording.removeprefix("every ").replace("all", "1"))
        self._expected: dict[str, _Expected] = {}
        """By uuid, of the episodes that have not ended."""

    def resume(self, step: int, *, kept: Container[str] = ()) -> None:
        """The run begins, or goes on after `step`. `kept`: uuids of the episodes of later steps that still
        count."""
        self._writer.resume(step, kept=kept)
        self._writer.status(step=step)
        self._step = step

    def keeps(self, step: int) -> bool:
        """Whether the calls and tokens of the step's episodes are kept."""
        return bool(self._every) and step % self._every == 0

    @contextmanager
    def saying_how_it_ends(self) -> Generator[None]:
        """The run is what happens while the context is open."""
        try:
            yield
        except asyncio.CancelledError:
            self.status(state="stopped")
            raise
        except Exception as error:
            self.status(state="failed", failure=f"{type(error).__name__}: {error}")
            raise
        self.status(state="finished")

    # Episodes

    def expect(self, episodes: Iterable[PlannedEpisode], *, step: int, label: str = "") -> None:
        """These episodes will end. `label`: of the evaluation that they are for; empty for training.

        Said again of an episode, it changes nothing.
        """
        for episode in episodes if self._every else ():
            self._expected.setdefault(episode.episode_uuid, _Expected(step, label, episode.payload))

    def ended(self, outcome: Outcome) -> None:
        """An episode ended. The run goes on, whatever is wrong with its entry."""
        try:
            self._ended(outcome)
        except Exception:
            logger.exception("record.entry_dropped episode=%s", outcome.episode_uuid)

    def _ended(self, outcome: Outcome) -> None:
        if not self._every:
            return
        expected = self._expected.pop(outcome.episode_uuid, _Expected(0, "", {}))
        entry = _entry(outcome, expected)
        # Nobody planned clients' own samples for a step; the next one will take them.
        step = expected.step or self._step + 1
        keeps = self.keeps(step) or outcome.episode_type == "eval"
        self._writer.episode(entry, with_tokens=keeps)
        for attempt, transcript in outcome.transcripts.items() if keeps else ():
            self._writer.transcript(outcome.episode_uuid, attempt, transcript)

    # Steps

    def step(
        self,
        step: int,
        *,
        outcomes: Mapping[str, Outcome],
        trained: Sequence[Learner],
        metrics: Mapping[str, float],
        max_lag: int | None,
        stale: Container[str],
        stopped: str = "",
    ) -> None:
        """A training step. `trained`: the run's own policy, then those of roles; `stale`: uuids of episodes
        that were too old. `stopped`: why it changed no weights and ends the run; empty if it did not."""
        self._step = step
        self._writer.metrics(step, metrics)
        self._writer.step(
            step,
            policy_version=metrics["policy_version"],
            reward=metrics.get("reward/mean"),
            accepted=metrics["episodes/accepted"],
            failed=metrics["episodes/failed"],
            trained=sum(len(group.episodes) for group in trained[0].trained),
            max_lag=max_lag,
        )
        noticed = sum((each.alignment.noticed for each in trained), Counter[tuple[str, str, str]]())
        for (kind, name, uuid), count in sorted(noticed.items())[:MAX_FINDINGS]:
            self._writer.finding(step=step, kind=kind, name=name, detail="", episode=uuid, count=count)
        if self._every:
            # What stops a run is looked at, whichever steps are kept.
            keeps = self.keeps(step) or bool(stopped)
            entries: dict[str, TrainedEpisode] = {}
            for learner in trained:
                view = _StepView(learner, keeps=keeps, stopped=stopped)
                for group in [*learner.groups, *learner.replayed]:
                    for entry in view.group(group):
                        entries[entry.uuid] = _together(entries.get(entry.uuid), entry)
            for uuid, outcome in outcomes.items():
                if uuid not in entries and isinstance(outcome, EpisodeAccepted):
                    why = Use.STALE if uuid in stale else Use.GROUP_TOO_SMALL
                    entries[uuid] = TrainedEpisode(uuid=uuid, outcome=why)
            self._writer.trained(step, list(entries.values()))

    def chats(
        self,
        step: int,
        datums: Sequence[tinker.Datum],
        logprobs: Sequence[FloatArray],
        metrics: Mapping[str, float],
    ) -> None:
        """A step of supervised fine-tuning. `logprobs`: float32 [T] for each datum, before the step."""
        self._writer.metrics(step, metrics)
        number = len(datums)
        self._writer.step(step, policy_version=step, accepted=number, failed=0, trained=number)
        if not self.keeps(step) or len(logprobs) < number:
            return
        entries = [_chat(step, datum, row) for datum, row in zip(datums, logprobs, strict=True)]
        for episode, _ in entries:
            self._writer.episode(episode)
        self._writer.trained(step, [trained for _, trained in entries])

    def finding(self, step: int, name: str, detail: str) -> None:
        """A misaligned step."""
        self._writer.finding(step=step, kind="finding", name=name, detail=detail, episode="", count=1)

    def evaluation(self, evaluated: EvaluationRow, metrics: Mapping[str, float]) -> None:
        self._writer.metrics(evaluated.step, metrics)
        self._writer.evaluation(
            label=evaluated.label,
            step=evaluated.step,
            policy_version=evaluated.policy_version,
            score=evaluated.score,
            accepted=evaluated.accepted,
            failed=evaluated.failed,
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics besides a step's or an evaluation's."""
        self._writer.metrics(step, metrics)

    def status(self, **values: Any) -> None:
        """Facts about the run, such as its server's address."""
        self._writer.status(**values)

    def health(self) -> list[HealthRow]:
        """By what is written so far; empty if nothing can be written any more. Blocks."""
        if self._writer.failure:
            return []
        record = Record(self._writer.folder)
        try:
            return health_rows(record)
        finally:
            record.close()


def _entry(outcome: Outcome, expected: _Expected) -> RecordedEpisode:
    accepted = isinstance(outcome, EpisodeAccepted)
    failures = outcome.retries if accepted else outcome.failures
    last = failures[-1] if failures else {}
    cancelled = not accepted and outcome.is_cancelled
    return RecordedEpisode(
        uuid=outcome.episode_uuid,
        episode_type=outcome.episode_type,
        step=expected.step,
        label=expected.label,
        group_id=outcome.group_id,
        task=str(expected.payload.get("task", "")),
        sample=expected.payload.get("sample"),
        status="accepted" if accepted else "cancelled" if cancelled else "failed",
        reward=outcome.reward if accepted else None,
        is_success=outcome.is_success if accepted else None,
        attempt=outcome.attempt if accepted else int(str(last.get("attempt", 0))),
        client_uuid=outcome.client_uuid if accepted else str(last.get("client_uuid", "")),
        queued_s=outcome.queued_s if accepted else None,
        ended=time.time(),
        detail=EpisodeDetail(
            calls=outcome.all_calls if accepted else [],
            failed_calls=outcome.failed_calls,
            failures=failures,
            metadata=outcome.metadata if accepted else {},
            log_metrics=_figures(outcome) if accepted else {},
        ),
    )


def _figures(outcome: EpisodeAccepted) -> dict[str, float]:
    """What the program reported of the episode, and the rewards of roles."""
    rewards = {f"role/{name}/reward": reward for name, reward in outcome.role_rewards.items()}
    return {**outcome.log_metrics, **rewards}


def _chat(step: int, datum: tinker.Datum, logprobs: FloatArray) -> tuple[RecordedEpisode, TrainedEpisode]:
    """A chat as an episode without calls or reward."""
    inputs = datum.loss_fn_inputs
    targets = inputs["target_tokens"].to_numpy()
    trains = inputs["weights"].to_numpy() > 0
    tokens = np.concatenate([datum.model_input.to_ints()[:1], targets]).astype(np.int32)
    detail = EpisodeDetail(
        chat=pack_ids(tokens),
        chat_trained=np.concatenate([[False], trains]).astype(np.uint8).tobytes(),
        log_metrics={"nll": float(-logprobs[trains].mean())} if trains.any() else {},
    )
    uuid = uuid4().hex
    episode = RecordedEpisode(
        uuid=uuid,
        episode_type="train",
        step=step,
        group_id=f"step-{step}",
        status="accepted",
        ended=time.time(),
        detail=detail,
    )
    sequence = TrainedSequence(
        number=0, trainer_logprobs=pack_logprobs(logprobs[trains]), uses=bytes([TokenUse.TRAINED])
    )
    return episode, TrainedEpisode(uuid=uuid, outcome="trained", sequences=[sequence])


def _together(known: TrainedEpisode | None, more: TrainedEpisode) -> TrainedEpisode:
    """What the policies of a run did with an episode, as one entry: the run's own comes first."""
    if known is None:
        return more
    outcome = more.outcome if more.outcome == "trained" else known.outcome
    return msgspec.structs.replace(known, outcome=outcome, sequences=[*known.sequences, *more.sequences])


class _StepView:
    """What a policy's last update did with each episode."""

    def __init__(self, learner: Learner, *, keeps: bool, stopped: str) -> None:
        self._learner = learner
        self._role = learner.role
        self._stopped = stopped
        self._rule: AdvantageRule = learner.rule
        self._advantages = learner.advantages
        self._compared: dict[int, Compared] = {id(each.rollout): each for each in learner.compared}
        self._corrected = learner.corrected
        self._trains = learner.trains
        self._reasons = learner.alignment.reasons
        self._keeps = keeps

    def group(self, group: RolloutGroup) -> list[TrainedEpisode]:
        advantages = group.advantages(self._rule).tolist()
        return [
            TrainedEpisode(
                uuid=episode.episode_uuid,
                outcome=self._outcome(group, episode),
                advantage=advantage,
                sequences=[
                    self._sequence(number, rollout, group)
                    for number, rollout in enumerate(episode.rollouts)
                    if self._keeps
                ],
            )
            for episode, advantage in zip(group.episodes, advantages, strict=True)
        ]

    def _outcome(self, group: RolloutGroup, episode: EpisodeRollouts) -> str:
        outcome = self._learner.outcome_of(group, episode)
        return "stopped" if self._stopped and outcome == Use.NOTHING_TO_TRAIN else outcome

    def _sequence(self, number: int, rollout: Rollout, group: RolloutGroup) -> TrainedSequence:
        sampled = rollout.sampled
        compared = self._compared.get(id(rollout))
        advantages = self._advantages.get(id(rollout))
        entropies = compared.entropies if compared else None
        return TrainedSequence(
            number=number,
            role=self._role,
            trainer_logprobs=pack_logprobs(compared.trainer_logprobs[sampled]) if compared else b"",
            entropies=b"" if entropies is None else entropies[sampled].astype("<f2").tobytes(),
            advantages=b"" if advantages is None else _shortest(advantages[sampled].astype("<f4")),
            uses=_shortest(self._uses(rollout, advantages)),
            reason="" if advantages is not None else self._reason(rollout, group),
        )

    def _uses(self, rollout: Rollout, advantages: FloatArray | None) -> Any:
        """uint8 [S]: `TokenUse` of each sampled token."""
        uses = np.full(len(rollout.tokens), TokenUse.TRAINED if advantages is not None else TokenUse.LEFT_OUT)
        if advantages is not None:
            uses[~rollout.loss_mask] = TokenUse.CONSTRAINED
            if (corrected := self._corrected.get(id(rollout))) is not None:
                uses[corrected] = TokenUse.CORRECTED
        return uses[rollout.sampled].astype(np.uint8)

    def _reason(self, rollout: Rollout, group: RolloutGroup) -> str:
        if reason := self._reasons.get(id(rollout)):
            return reason
        if self._stopped and self._trains(group):
            return f"the step was stopped: {self._stopped}"
        return "every token was constrained by a grammar" if self._trains(group) else "same_reward"


def _shortest(values: Any) -> bytes:
    """The bytes of `values` [S], or of one of them if they are all equal."""
    return values[:1].tobytes() if len(values) and (values == values[0]).all() else values.tobytes()


class RecordedProgress(ProgressReporter):
    """Shows a run's progress to `shown` and records it."""

    def __init__(self, shown: ProgressReporter, writer: RecordWriter) -> None:
        self._shown = shown
        self._writer = writer
        self._waits: list[str] = []

    def begin(self, steps: int, *, done: int = 0) -> None:
        self._writer.status(steps=steps)
        self._shown.begin(steps, done=done)

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        self._waits.append(what)
        self._say_wait()
        try:
            with self._shown.waiting(what):
                yield
        finally:
            self._waits.pop()
            self._say_wait()

    def _say_wait(self) -> None:
        self._writer.status(waiting_for=self._waits[-1] if self._waits else "", waiting_since=time.time())

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        with self._shown.phase(label, total=total) as shown:
            phase = _RecordedPhase(shown, self._writer, label, total)
            phase.advance(0)
            try:
                yield phase
            finally:
                self._writer.status(phase=None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.status(step=step, last_step=time.time())
        self._shown.step(step, metrics)

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        self._shown.evaluation(label, score, episodes, failed)

    def note(self, message: str) -> None:
        self._writer.note(message)
        self._shown.note(message)


@dataclass
class _RecordedPhase(Phase):
    shown: Phase
    writer: RecordWriter
    label: str
    total: int
    done: int = 0

    def advance(self, episodes: int) -> None:
        self.done += episodes
        self.writer.status(
            phase={"label": self.label, "done": self.done, "total": self.total, "time": time.time()}
        )
        if episodes:
            self.shown.advance(episodes)
