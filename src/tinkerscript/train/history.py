"""`History`: where a run stands according to its journal, and what a resumed run can still use.

Weights live in checkpoints, results in the journal. A run resumed from the checkpoint of step k builds on the
policy versions published up to k; everything later is undone. The results for step k + 1 were sampled by the
checkpoint's own weights and are used again; results of later weights are not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.train.journal import (
    AnyEvent,
    Checkpointed,
    Discarded,
    EpisodeRegistered,
    Evaluated,
    PolicyPublished,
    Resumed,
    SetAside,
    StepConsumed,
    usable,
)
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome


@dataclass
class History:
    """The part of a run that a resumed run builds on."""

    step: int = 0
    """Step of the checkpoint to resume from; 0: the initial weights."""

    checkpoint: Checkpointed | None = None
    evaluations: dict[str, Evaluated] = field(default_factory=dict[str, Evaluated])
    """By label."""

    versions: dict[int, int] = field(default_factory=dict[int, int])
    """Policy version -> training steps behind it."""

    planned: list[EpisodeRegistered] = field(default_factory=list[EpisodeRegistered])
    """Registered episodes of the next step."""

    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """Outcomes of those that ended, by episode uuid."""

    next_position: int = 0
    """In the order of training samples: the first that is unused."""

    from_clients: list[Outcome] = field(default_factory=list[Outcome])
    """Results of clients' own samples that no step has used."""

    consumed: list[StepConsumed] = field(default_factory=list[StepConsumed])
    """The steps so far, in order."""

    trained: dict[str, EpisodeAccepted] = field(default_factory=dict[str, EpisodeAccepted])
    """The episodes that they trained on, by uuid."""


def read_history(events: Sequence[AnyEvent], *, exists: Callable[[int], bool]) -> History:
    """Where to resume. `exists(step)`: whether the step's checkpoint is complete on disk."""
    checkpoints = [e for e in events if isinstance(e, Checkpointed) and exists(e.step)]
    checkpoint = checkpoints[-1] if checkpoints else None
    step = checkpoint.step if checkpoint else 0
    versions, evaluations, plans, consumed = _surviving([*events, Resumed(step=step)])
    outcomes = {e.episode_uuid: usable(e) for e in events if isinstance(e, EpisodeAccepted | EpisodeFailed)}
    set_aside = {uuid for e in events if isinstance(e, SetAside) for uuid in e.episode_uuids}
    discarded = {uuid for e in events if isinstance(e, Discarded) for uuid in e.episode_uuids}
    planned = _usable_plans(plans.get(step + 1, []), outcomes, set_aside, discarded)
    wanted = {plan.episode_uuid for plan in planned}
    used = {uuid for event in consumed.values() for uuid in event.episode_uuids}
    trained = {
        uuid
        for event in consumed.values()
        for groups in (event.trained, *event.trained_by_role.values())
        for group in groups
        for uuid in group
    }
    used |= discarded | set_aside
    return History(
        step=step,
        checkpoint=checkpoint,
        evaluations=evaluations,
        versions=versions,
        planned=planned,
        outcomes={uuid: outcome for uuid, outcome in outcomes.items() if uuid in wanted},
        from_clients=[
            o
            for o in outcomes.values()
            if o.pool and o.episode_type == "train" and o.episode_uuid not in used
        ],
        consumed=[event for _, event in sorted(consumed.items())],
        trained={
            uuid: o for uuid, o in outcomes.items() if uuid in trained and isinstance(o, EpisodeAccepted)
        },
        next_position=1 + max((p.position for each in plans.values() for p in each), default=-1),
    )


def _usable_plans(
    plans: list[EpisodeRegistered],
    outcomes: Mapping[str, Outcome],
    set_aside: Container[str],
    discarded: Container[str],
) -> list[EpisodeRegistered]:
    """The plans without groups that can never train: a member was cancelled or set aside, or every result
    was discarded."""
    ended = {plan.episode_uuid: outcomes.get(plan.episode_uuid) for plan in plans}
    broken = {
        plan.group_id
        for plan in plans
        if (isinstance(outcome := ended[plan.episode_uuid], EpisodeFailed) and outcome.is_cancelled)
        or plan.episode_uuid in set_aside
    }
    hopeful = {
        plan.group_id
        for plan in plans
        if not isinstance(ended[plan.episode_uuid], EpisodeAccepted) or plan.episode_uuid not in discarded
    }
    return [plan for plan in plans if plan.group_id in hopeful - broken]


def recorded_groups(
    events: Iterable[AnyEvent], *, trains_constrained: bool = False
) -> Iterator[RolloutGroup]:
    """The accepted training episodes of a journal by group, in the order in which groups began.

    For converters: a group may be smaller than planned, and no step need have trained on it. Left out are
    episodes that were set aside as misaligned. Rewards are on the rollouts too, whose `env_example_id` is the
    group's. `trains_constrained`: see `merge_calls`.
    """
    groups: dict[str, list[EpisodeAccepted]] = {}
    set_aside: set[str] = set()
    for event in events:
        if isinstance(event, EpisodeAccepted) and event.episode_type == "train":
            groups.setdefault(event.group_id, []).append(event)
        elif isinstance(event, SetAside):
            set_aside.update(event.episode_uuids)
    for group_id, outcomes in groups.items():
        episodes = tuple(
            _rewarded(outcome, trains_constrained)
            for outcome in outcomes
            if outcome.episode_uuid not in set_aside
        )
        if episodes:
            yield RolloutGroup(group_id, episodes)


def _rewarded(outcome: EpisodeAccepted, trains_constrained: bool) -> EpisodeRollouts:
    rollouts = merge_calls(
        outcome.calls, episode_uuid=outcome.episode_uuid, trains_constrained=trains_constrained
    )
    return EpisodeRollouts(
        outcome.episode_uuid,
        outcome.reward,
        tuple(each.rewarded(outcome.reward, env_example_id=outcome.group_id) for each in rollouts),
        tuple(outcome.calls),
        outcome.metadata,
    )


Surviving = tuple[
    dict[int, int], dict[str, Evaluated], dict[int, list[EpisodeRegistered]], dict[int, StepConsumed]
]


def _surviving(events: Iterable[AnyEvent]) -> Surviving:
    """Versions, evaluations, plans and consumed episodes by step, minus what each `Resumed` undoes."""
    consumed: dict[int, StepConsumed] = {}
    versions: dict[int, int] = {}
    evaluations: dict[str, Evaluated] = {}
    plans: dict[int, list[EpisodeRegistered]] = {}
    for event in events:
        match event:
            case PolicyPublished():
                versions[event.policy_version] = event.step
            case Evaluated():
                evaluations[event.label] = event
            case EpisodeRegistered(step=step) if step:
                plans.setdefault(step, []).append(event)
            case StepConsumed():
                consumed[event.step] = event
            case Resumed(step=step):
                consumed = {s: event for s, event in consumed.items() if s <= step}
                versions = {version: s for version, s in versions.items() if s <= step}
                evaluations = {label: e for label, e in evaluations.items() if e.step <= step}
                plans = {s: each for s, each in plans.items() if s <= step + 1}
            case _:
                pass
    return versions, evaluations, plans, consumed
