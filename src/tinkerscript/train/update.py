"""`PolicyUpdate`: one training step on all policies' weights, and its ledger rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tinkerscript.errors import AlignmentError
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.train.curriculum import key_of
from tinkerscript.train.learner import Learner
from tinkerscript.train.off_policy import PolicyLags
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.step_log import StepLog
from tinkerscript.train.step_rows import (
    keeps_tokens,
    left_out_rows,
    set_aside_rows,
    token_rows,
    trained_rows,
)
from tinkerscript.train.stream import TrainingStep
from tinkerscript.trainer_link.messages import EpisodeAccepted


class PolicyUpdate:
    def __init__(self, parts: OpenRun, learners: Sequence[Learner], lags: PolicyLags, log: StepLog) -> None:
        self._recording, self._ledger = parts.config.recording, parts.ledger
        self.own, *self.roles = self._learners = list(learners)
        self._lags = lags
        self._log = log
        # Uuid -> ledger number, of episodes that may train.
        self._sequences: dict[str, int] = {}
        self._restore(parts)

    def _restore(self, parts: OpenRun) -> None:
        outcomes = {each.sequence: each for each in parts.replayed}
        stale = {
            outcomes[row.episode].episode_uuid: row.reason
            for row in parts.history.replayed
            if row.outcome == Use.STALE
        }
        groups: dict[tuple[int, str, int], list[EpisodeAccepted]] = {}
        for row in parts.history.replayed:
            groups.setdefault((row.step, row.role, row.place), []).append(outcomes[row.episode])
        for learner in self._learners:
            learner.stale |= stale
            of_role = {key: group for key, group in groups.items() if key[1] == learner.role}
            for step in sorted({step for step, _, _ in of_role}) if learner.replay is not None else ():
                assert learner.replay is not None
                learner.replay.drop(partial(self._lags.may_train, step=step - 1))
                used = [group for key, group in of_role.items() if key[0] == step]
                learner.replay.record(map(learner.group_again, used))
        self._sequences = {each.episode_uuid: each.sequence for each in parts.replayed}

    async def check(self, step: TrainingStep) -> None:
        """Decide what trains, before any policy's weights change.

        If the trainer does not reproduce the samples, sets them aside and raises AlignmentError.
        """
        by_version = self._lags.by_version(step.number - 1)
        kept = {uuid for each in self._learners if each.replay is not None for uuid in each.replay.episodes}
        self._sequences = {uuid: number for uuid, number in self._sequences.items() if uuid in kept}
        self._sequences |= {uuid: outcome.sequence for uuid, outcome in step.batch.outcomes.items()}
        try:
            samples = {
                each.group_id: key_of(each.payload) for each in step.batch.groups.values() if each.payload
            }
            for each in self._learners:
                each.take(step.groups, step.stale, samples)
            for each in self._learners:
                await each.check(
                    step=step.number, lag_of_version=by_version, replayed=self._replayed(each, step)
                )
        except AlignmentError as error:
            await self.own.drop_gradients()  # A role may have stopped the step.
            self._ledger.note(self._log.stopped(step, error))
            self.note_tokens(step, stopped=error.name)
            await self._ledger.commit(set_aside_rows(step.batch, step.number, str(error)))
            raise

    async def train(self, step: TrainingStep) -> list[dict[str, float]]:
        return [await each.train(step.number) for each in self._learners]

    def _replayed(self, learner: Learner, step: TrainingStep) -> list[RolloutGroup]:
        if learner.replay is None:
            return []
        done = step.number - 1
        learner.replay.drop(partial(self._lags.may_train, step=done))
        groups = learner.replay.draw(step.number)
        for group in groups if learner is self.own else ():
            step.lags.update(self._lags.of_group(group, step=done))
        return groups

    def rows(self, step: TrainingStep) -> list[TrainedRow]:
        left_out = left_out_rows(step.batch, step.number, stale=step.stale)
        rows = {(row.episode, row.role): row for row in left_out}
        for learner in self._learners:
            for row in trained_rows(learner, step.number, self._sequences):
                rows[row.episode, row.role] = row
        return list(rows.values())

    def note_tokens(self, step: TrainingStep, *, stopped: str = "") -> None:
        """Only if the run records them or they explain why it stops."""
        if not (stopped or keeps_tokens(self._recording, step.number)):
            return
        for learner in self._learners:
            for rows in token_rows(learner, step.number, self._sequences, stopped=stopped):
                self._ledger.note(rows)
