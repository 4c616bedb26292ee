"""`Batch`: the episodes that a training step or an evaluation waits for, and when it has enough.

Pure: no I/O. Invariant: episodes are tracked by id, not counted, so an outcome that arrives twice or belongs
to another batch changes nothing. Adding an outcome is O(1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tinkerscript.train.journal import EpisodeAccepted, Outcome

BatchRule = Literal["groups", "differing_groups", "episodes"]

MIN_GROUP = 2
"""Accepted episodes that a group needs to train; smaller groups are dropped and counted."""


@dataclass
class Group:
    """The episodes of one sample."""

    group_id: str
    size: int
    """Episodes in all."""

    outcomes: dict[str, Outcome | None] = field(default_factory=dict[str, Outcome | None])
    """By episode uuid; None while the episode runs."""

    ended: int = 0

    @property
    def is_complete(self) -> bool:
        return self.ended >= self.size

    @property
    def accepted(self) -> list[EpisodeAccepted]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, EpisodeAccepted)]

    @property
    def differs(self) -> bool:
        """Whether the group carries a gradient: its accepted episodes' rewards differ."""
        return len({outcome.reward for outcome in self.accepted}) > 1


class Batch:
    """The groups of one step or evaluation, under a rule for when they are enough."""

    def __init__(
        self,
        label: str,
        *,
        rule: BatchRule,
        groups: int,
        group_size: int,
        max_groups: int = 0,
        from_clients: bool = False,
    ) -> None:
        """`max_groups`: the limit for the rule `differing_groups` (0: `groups`); `from_clients`: groups are
        not planned, they arrive as clients register them.
        """
        self.label = label
        self.groups: dict[str, Group] = {}
        self._rule: BatchRule = rule
        self._needed = groups
        self._group_size = group_size
        self._max_groups = max_groups or groups
        self._from_clients = from_clients
        self._group_of: dict[str, Group] = {}
        self.ended = 0
        """Episodes with an outcome."""

        self._accepted = self._complete = self._differing = 0

    def plan(self, group_id: str, episode_uuids: Iterable[str]) -> None:
        """Wait for these episodes of a group too."""
        uuids = list(episode_uuids)
        group = self.groups.setdefault(group_id, Group(group_id, 0))
        group.size += len(uuids)
        group.outcomes.update(dict.fromkeys(uuids))
        self._group_of.update(dict.fromkeys(uuids, group))

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome; False if it is a duplicate or its episode is not in this batch."""
        group = self._group_of.get(outcome.episode_uuid)
        if group is None or group.outcomes[outcome.episode_uuid] is not None:
            return False
        self._take(group, outcome)
        return True

    def adopt(self, outcome: Outcome) -> None:
        """Add an outcome without a plan: the episode of a sample that a client registered."""
        size = outcome.group_size or self._group_size
        group = self.groups.setdefault(outcome.group_id, Group(outcome.group_id, size))
        self._group_of[outcome.episode_uuid] = group
        self._take(group, outcome)

    def _take(self, group: Group, outcome: Outcome) -> None:
        group.outcomes[outcome.episode_uuid] = outcome
        group.ended += 1
        self.ended += 1
        self._accepted += isinstance(outcome, EpisodeAccepted)
        if group.ended == group.size:
            self._complete += 1
            self._differing += group.differs

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """By episode uuid, of the episodes that ended."""
        found = (group.outcomes[uuid] for uuid, group in self._group_of.items())
        return {outcome.episode_uuid: outcome for outcome in found if outcome is not None}

    @property
    def leftovers(self) -> list[str]:
        """Episodes that are still running."""
        return [uuid for uuid, group in self._group_of.items() if group.outcomes[uuid] is None]

    @property
    def is_met(self) -> bool:
        """Whether the batch has enough, or nothing is left to wait for."""
        if self._enough():
            return True
        runs_out = self.ended == len(self._group_of) and not self.fresh_groups_wanted
        return runs_out and not self._from_clients

    def _enough(self) -> bool:
        match self._rule:
            case "groups":
                return self._complete >= self._needed
            case "differing_groups":
                return self._differing >= self._needed
            case "episodes":
                return self._accepted >= self._needed * self._group_size

    @property
    def fresh_groups_wanted(self) -> int:
        """Groups to register as replacements of complete ones whose rewards are all equal."""
        if self._rule != "differing_groups":
            return 0
        promising = len(self.groups) - self._complete + self._differing
        return max(0, min(self._needed - promising, self._max_groups - len(self.groups)))

    def trainable(self) -> list[Group]:
        """The groups that can train: complete ones with `MIN_GROUP` accepted episodes.

        For the rule `episodes` they need not be complete.
        """
        groups = [g for g in self.groups.values() if g.is_complete or self._rule == "episodes"]
        return [group for group in groups if len(group.accepted) >= MIN_GROUP]
