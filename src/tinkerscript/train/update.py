"""`PolicyUpdate`: what one training step does to the weights of every policy of the run, and what it leaves
of that in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tinkerscript.errors import AlignmentError
from tinkerscript.ledger.rows import TrainedRow
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.tracing import is_on, span
from tinkerscript.train.collector import Batch
from tinkerscript.train.learner import Learner
from tinkerscript.train.off_policy import PolicyLags
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.policy import Policy
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
    """Trains the run's own policy, and the roles that train beside it."""

    def __init__(
        self, parts: OpenRun, learners: Sequence[Learner], policy: Policy, lags: PolicyLags, log: StepLog
    ) -> None:
        """`learners`: that of the run's own policy is the first."""
        self._recording, self._ledger = parts.config.recording, parts.ledger
        self.own, *self.roles = self._learners = list(learners)
        self._policy = policy
        self._lags = lags
        self._log = log
        self._sequences: dict[str, int] = {}
        """Uuid of each episode that may train again -> its number in the ledger."""

        self._restore(parts)

    def _restore(self, parts: OpenRun) -> None:
        """Fill the replay buffers as an uninterrupted run would have."""
        outcomes = {each.sequence: each for each in parts.replayed}
        groups: dict[tuple[int, str, int], list[EpisodeAccepted]] = {}
        for row in parts.history.replayed:
            groups.setdefault((row.step, row.role, row.place), []).append(outcomes[row.episode])
        for learner in self._learners:
            of_role = {key: group for key, group in groups.items() if key[1] == learner.role}
            for step in sorted({step for step, _, _ in of_role}) if learner.replay is not None else ():
                assert learner.replay is not None
                learner.replay.drop(partial(self._lags.may_train, step=step - 1))
                used = [group for key, group in of_role.items() if key[0] == step]
                learner.replay.record(map(learner.group_again, used))
        self._sequences = {each.episode_uuid: each.sequence for each in parts.replayed}

    async def train(self, step: TrainingStep) -> list[dict[str, float]]:
        """Update the weights; returns each policy's metrics.

        Raises AlignmentError, and sets the step's episodes aside, if they are not what the trainer computes.
        """
        done = step.number - 1
        by_version = self._lags.by_version(done)
        links = _claims_of(step) if is_on() else ()
        try:
            async with self._policy.resting():
                with span("train step", step=step.number, links=links):
                    taken = [(each, each.take(step.groups)) for each in self._learners]
                    for each, groups in taken:  # All are checked before any weights change.
                        replayed = self._replayed(each, step)
                        await each.check(groups, step=step.number, lags=by_version, replayed=replayed)
                    return [await each.train(step.number) for each in self._learners]
        except AlignmentError as error:
            self._ledger.note(self._log.stopped(step, error))
            self.note_tokens(step, stopped=error.name)
            await self._ledger.commit(set_aside_rows(step.batch, step.number, str(error)))
            raise

    def _replayed(self, learner: Learner, step: TrainingStep) -> list[RolloutGroup]:
        """Groups of earlier steps that train again; counts the lags of the run's own policy's."""
        if learner.replay is None:
            return []
        done = step.number - 1
        learner.replay.drop(partial(self._lags.may_train, step=done))
        groups = learner.replay.draw(step.number)
        for group in groups if learner is self.own else ():
            step.lags.update(self._lags.of_group(group, step=done))
        return groups

    def rows(self, step: TrainingStep) -> list[TrainedRow]:
        """What the step did with each episode: those of its batch, and those that it replayed."""
        left_out = left_out_rows(step.batch, step.number, stale=step.stale)
        rows = {(row.episode, row.role): row for row in left_out}
        sequences = self._sequences_with(step.batch)
        for learner in self._learners:
            for row in trained_rows(learner, step.number, sequences):
                rows[row.episode, row.role] = row
            if learner.replay is not None:
                self._sequences = sequences
        return list(rows.values())

    def _sequences_with(self, batch: Batch) -> dict[str, int]:
        return self._sequences | {uuid: outcome.sequence for uuid, outcome in batch.outcomes.items()}

    def note_tokens(self, step: TrainingStep, *, stopped: str = "") -> None:
        """What was computed for each token, if the run keeps it. What stops a run is always kept."""
        if not (stopped or keeps_tokens(self._recording, step.number)):
            return
        sequences = self._sequences_with(step.batch)
        for learner in self._learners:
            for rows in token_rows(learner, step.number, sequences, stopped=stopped):
                self._ledger.note(rows)


def _claims_of(step: TrainingStep) -> list[tuple[str, int]]:
    """Episode and attempt of what a step trains on, but for what is replayed."""
    fresh: list[EpisodeAccepted] = [each for _, accepted in step.groups for each in accepted]
    return [(each.episode_uuid, each.attempt) for each in fresh]
