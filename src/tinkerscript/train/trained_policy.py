"""`TrainedPolicy`: a policy that a run trains, and what it learns from: the run's own, or that of a role.

Invariant: it merges and trains the calls of its own role and no others, with its own rewards, advantages,
optimizer, replay buffer and alignment report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinkerscript.config import TrainingConfig
from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.alignment.report import explain
from tinkerscript.rollouts.call import calls_of
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.train.journal import EpisodeAccepted
from tinkerscript.train.replay import ReplayBuffer

if TYPE_CHECKING:  # It leads to torch.
    from tinkerscript.train.learner import Learner

AcceptedGroup = tuple[str, Sequence[EpisodeAccepted]]
"""The id of a group, and those of its episodes that may train."""


class TrainedPolicy:
    """What one step after another does with a policy's weights: `take` groups, `check` them, `train`."""

    def __init__(
        self,
        learner: Learner,
        report: AlignmentReport,
        config: TrainingConfig,
        *,
        seed: int,
        role: str = "",
    ) -> None:
        """`report`: what `learner` reports to. `role`: empty for the run's own policy."""
        self.role = role
        self.learner = learner
        self.report = report
        self._config = config
        self.replay = ReplayBuffer(config, seed=seed) if config.replay.uses > 1 else None
        self.groups: list[RolloutGroup] = []
        """The step's own groups."""

        self.replayed: list[RolloutGroup] = []
        """Groups of earlier steps that it trains on again."""

    def take(self, groups: Iterable[AcceptedGroup], *, replayed: Sequence[RolloutGroup] = ()) -> None:
        """Merge a step's episodes. A role's groups have the episodes that called it, if they are enough."""
        self.report.begin_step()
        self.groups, self.replayed = [], list(replayed)
        for group_id, accepted in groups:
            episodes = [outcome for outcome in accepted if self._has_part_in(outcome)]
            if len(episodes) >= (self._config.min_group if self.role else 0):
                self.groups.append(RolloutGroup(group_id, tuple(map(self._merged, episodes))))
        for group in self.groups:
            for episode in group.episodes:
                self.report.add_episode(episode)

    def group_again(self, outcomes: Sequence[EpisodeAccepted]) -> RolloutGroup:
        """A group that an earlier step trained on."""
        return RolloutGroup(outcomes[0].group_id, tuple(map(self._merged, outcomes)))

    async def check(self, step: int, lags: Mapping[int, int]) -> None:
        """Decide what may train. Raises AlignmentError as `Learner.check_step` does."""
        try:
            await self.learner.check_step(self.groups, step=step, lags=lags, replayed=self.replayed)
        except AlignmentError as error:
            if not self.role:
                raise
            raise AlignmentError(f"role {self.role}: {error}", name=error.name) from error

    async def train(self, step: int, *, now: float) -> dict[str, float]:
        """Change the weights; returns the metrics of the update. `now`: Unix time of the step in seconds."""
        metrics = await self.learner.train(step)
        if self.replay is not None:
            self.replay.record(self.used, at=now)
            metrics |= self.replay.metrics(self.replayed)
        return metrics

    @property
    def used(self) -> list[RolloutGroup]:
        """The groups whose gradients the step used."""
        return [*self.learner.trained, *self.replayed]

    @property
    def used_uuids(self) -> list[list[str]]:
        """The same as the uuids of their episodes."""
        return [[episode.episode_uuid for episode in group.episodes] for group in self.used]

    def summary(self) -> dict[str, Any]:
        """A role's part of summary.json."""
        report = self.report
        return {
            "tokens_trained": report.tokens_trained,
            "max_abs_dlogp": report.max_abs_dlogp,
            "mean_abs_dlogp": report.whole.at_lag_0.mean_abs,
            "sequences_per_episode": report.sequences_per_episode,
            "alignment": explain(report),
        }

    def _has_part_in(self, outcome: EpisodeAccepted) -> bool:
        """Whether an episode counts for the policy's groups. The run's own policy is in every one."""
        return not self.role or any(call.sampled for call in calls_of(outcome.all_calls, self.role))

    def _merged(self, outcome: EpisodeAccepted) -> EpisodeRollouts:
        rollouts = merge_calls(
            outcome.all_calls,
            episode_uuid=outcome.episode_uuid,
            trains_constrained=self._config.constrained_tokens == "train",
            role=self.role,
        )
        calls = tuple(calls_of(outcome.all_calls, self.role))
        return EpisodeRollouts(
            outcome.episode_uuid, outcome.reward_of(self.role), rollouts, calls, outcome.metadata
        )
